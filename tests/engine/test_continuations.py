"""Log-probabilities of continuations against transformers in float32, for each way a request can be run."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import InvalidRequest, PromptTooLong
from engine.request import Request, RequestOutput
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from tests.support.engines import OpenEngine, greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint

TOLERANCE = 1e-4
PROMPT_LENS = (1, 16, 33, 60)
CONTINUATIONS = ((5,), (7, 8, 9), (5, 6), tuple(range(40, 58)))


class Case:
    """A checkpoint, prompts, and what transformers says of each continuation behind each of them."""

    def __init__(self, path: Path) -> None:
        self.path = make_checkpoint(path, "qwen3_moe")
        rng = random.Random(3)
        self.prompts = [[rng.randrange(256) for _ in range(length)] for length in PROMPT_LENS]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        self.expected = [[self._total(model, prompt, each) for each in CONTINUATIONS] for prompt in self.prompts]

    @staticmethod
    @torch.inference_mode()
    def _total(model: Any, prompt: Sequence[int], continuation: Sequence[int]) -> float:
        rows = torch.log_softmax(model(torch.tensor([[*prompt, *continuation]])).logits[0], dim=-1)
        return sum(float(rows[len(prompt) - 1 + place, token]) for place, token in enumerate(continuation))

    def engine(self, **overrides: str) -> OpenEngine:
        return load_engine(self.path, {f"engine.{key.replace('__', '.')}": v for key, v in overrides.items()})

    def request(self, index: int, **params: Any) -> Request:
        given = SamplingParams(**{"max_tokens": 4, "temperature": 0.0, "ignore_eos": True, **params})
        return Request(f"s{index}", self.prompts[index], given, continuations=CONTINUATIONS)

    def requests(self, **params: Any) -> list[Request]:
        return [self.request(index, **params) for index in range(len(self.prompts))]

    def check_one(self, output: RequestOutput, index: int) -> None:
        assert output.error is None, output.error
        assert output.continuation_logprobs == pytest.approx(self.expected[index], abs=TOLERANCE)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("continued") / "tiny")


@pytest.mark.parametrize(
    "overrides",
    [
        {},
        {"max_num_batched_tokens": "7", "max_num_seqs": "7"},
        {"prefix_cache__enabled": "off"},
        {"async_scheduling": "on"},
        {"deterministic": "true"},
    ],
    ids=["together", "chunks", "apart", "ahead", "deterministic"],
)
@pytest.mark.parametrize(
    "params", [{}, {"n": 3, "temperature": 1.0, "seed": 4, "prompt_logprobs": 1}, {"max_tokens": 0}]
)
def test_they_are_scored_beside_the_answer_and_change_nothing(
    case: Case, overrides: dict[str, str], params: dict[str, Any]
) -> None:
    engine = case.engine(**overrides)
    outputs = run_all(engine, case.requests(**params))
    plain = run_all(case.engine(), [replace(each, continuations=()) for each in case.requests(**params)])
    for index in range(len(case.prompts)):
        output, without = outputs[f"s{index}"], plain[f"s{index}"]
        case.check_one(output, index)
        assert [each.token_ids for each in output.completions] == [each.token_ids for each in without.completions]
        assert (output.prompt_logprobs is None) == ("prompt_logprobs" not in params)
        assert without.continuation_logprobs == ()
        assert output.num_prompt_tokens == len(case.prompts[index])


def test_preempted_and_recomputed(case: Case) -> None:
    engine = case.engine(kv_cache__num_blocks="16", max_num_batched_tokens="16", max_num_seqs="8")
    for index in range(6):
        engine.add_request(greedy_request(f"g{index}", [index], 40))
    outputs = run_all(engine, case.requests(max_tokens=24))
    for index in range(len(case.prompts)):
        case.check_one(outputs[f"s{index}"], index)
    assert engine.stats().num_preemptions > 0


def test_the_prompt_is_computed_once_for_all_of_them(case: Case) -> None:
    engine = case.engine()
    run_all(engine, [case.request(3)])
    whole_blocks = (len(case.prompts[3]) - 1) // 16 * 16
    saved = engine.model_interface.cache_metrics_snapshot().saved_prefill_tokens
    assert saved == len(CONTINUATIONS) * whole_blocks > 0


def test_equal_requests_are_scored_once_and_others_are_not_equal(case: Case) -> None:
    engine, request = case.engine(), case.request(2)
    other = replace(request, request_id="other", continuations=CONTINUATIONS[:2])
    joined = replace(request, request_id="other", continuations=(CONTINUATIONS[0] + CONTINUATIONS[1],))
    outputs = run_all(
        engine, [request, replace(request, request_id="same"), other, replace(joined, request_id="joined")]
    )
    assert engine.stats().num_duplicates == 1
    assert outputs["same"].continuation_logprobs == outputs["s2"].continuation_logprobs
    assert [len(outputs[name].continuation_logprobs or ()) for name in ("other", "joined")] == [2, 1]
    case.check_one(outputs["same"], 2)


def test_a_request_that_is_aborted_has_none_and_an_equal_one_keeps_them(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens="16", max_num_seqs="16")
    engine.add_request(replace(case.request(3), request_id="gone"))
    engine.add_request(case.request(3))
    engine.step()
    assert engine.abort("gone")
    outputs = run_all(engine, [])
    assert outputs["gone"].was_aborted
    assert outputs["gone"].continuation_logprobs is None
    case.check_one(outputs["s3"], 3)


def test_a_request_whose_answer_had_ended_is_aborted_too(case: Case) -> None:
    engine = case.engine()
    engine.add_request(case.request(3, max_tokens=0))
    assert engine.abort("s3")
    assert [output.was_aborted for output in engine.step()] == [True]
    (output,) = run_all(engine, [case.request(3, max_tokens=0)]).values()
    assert not output.was_aborted


def test_after_a_checkpoint_they_are_scored_anew(case: Case) -> None:
    request = case.request(3, n=2, max_tokens=20, temperature=1.0, seed=2)
    uninterrupted = run_all(case.engine(), [request])["s3"]
    engine = case.engine()
    engine.add_request(request)
    for _ in range(6):
        engine.step()
    resume_state = engine.resume_state("s3")
    assert resume_state is not None
    assert len(resume_state.sequences) == 2
    output = run_all(case.engine(), [replace(request, resume=resume_state)])["s3"]
    case.check_one(output, 3)
    assert output.num_resumed_tokens == resume_state.num_tokens > 0
    assert [each.token_ids for each in output.completions] == [each.token_ids for each in uninterrupted.completions]
    fewer = replace(request, resume=resume_state, continuations=CONTINUATIONS[:1])
    assert run_all(case.engine(), [fewer])["s3"].num_resumed_tokens == 0  # it is of another request


def test_beside_a_grammar_that_the_answer_follows(case: Case) -> None:
    grammar = Grammar("choice", '["the","you"]', "guided_choice")
    output = run_all(case.engine(), [case.request(2, max_tokens=9, ignore_eos=False, grammar=grammar)])["s2"]
    case.check_one(output, 2)
    assert output.completions[0].text in ("the", "you")


def test_requests_that_generate_beside_them_get_the_tokens_they_get_alone(case: Case) -> None:
    generating = [greedy_request(f"g{index}", prompt, 12) for index, prompt in enumerate(case.prompts)]
    alone = run_all(case.engine(), generating)
    engine = case.engine(max_num_batched_tokens="32", max_num_seqs="32")
    for request in generating:
        engine.add_request(request)
    outputs = run_all(engine, case.requests())
    for request in generating:
        assert tokens_of(outputs[request.request_id]) == tokens_of(alone[request.request_id])


def test_what_cannot_be_scored_is_refused_by_name(case: Case) -> None:
    engine = case.engine(max_model_len="64")
    for bad in ((), (VOCAB_SIZE,), (1, 2, 3, 4, 5)):
        with pytest.raises(InvalidRequest) as caught:
            engine.add_request(replace(case.request(3, max_tokens=1), continuations=((1,), bad)))
        assert caught.value.param == "continuations[1]"
        assert isinstance(caught.value, PromptTooLong) == (len(bad) == 5)
    fitting = replace(case.request(3, max_tokens=1), continuations=((1, 2, 3, 4),))
    assert len(run_all(engine, [fitting])["s3"].continuation_logprobs or ()) == 1
