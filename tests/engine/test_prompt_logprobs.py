"""Log-probabilities of prompts against transformers in float32, for each way a prompt can be run."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from operator import and_
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from engine.errors import EngineFatal, NonFiniteLogits, PromptTooLong
from engine.models.decoder import DecoderModel
from engine.prompt_logprobs import PromptScorer
from engine.request import FinishReason, PromptLogprobs, Request, RequestOutput
from engine.sampling_params import SamplingParams
from engine.staging import PendingResult
from tests.support.engines import OpenEngine, greedy_request, load_engine, run_all, tokens_of
from tests.support.tiny_checkpoint import VOCAB_SIZE, make_checkpoint

TOLERANCE = 1e-4
NUM_TOP = 3
LENGTHS = (1, 2, 16, 17, 33, 60)


class Case:
    """A checkpoint, prompts of which half share a prefix of three blocks, and transformers' answers."""

    def __init__(self, path: Path) -> None:
        self.path = make_checkpoint(path, "qwen3")
        rng = random.Random(5)
        shared = [rng.randrange(256) for _ in range(48)]
        own = [[rng.randrange(256) for _ in range(LENGTHS[number % len(LENGTHS)])] for number in range(12)]
        self.prompts = [[*shared, *tokens] if number % 2 else tokens for number, tokens in enumerate(own)]
        model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
        with torch.inference_mode():
            logits = [model(torch.tensor([prompt])).logits[0] for prompt in self.prompts]
        self.expected = [torch.log_softmax(rows, dim=-1) for rows in logits]

    def engine(self, **overrides: str) -> OpenEngine:
        return load_engine(self.path, {f"engine.{key.replace('__', '.')}": v for key, v in overrides.items()})

    def request(self, index: int, **params: Any) -> Request:
        options: Mapping[str, Any] = {"max_tokens": 0, "temperature": 0.0, "prompt_logprobs": NUM_TOP} | params
        return Request(f"s{index}", self.prompts[index], SamplingParams(**options))

    def requests(self, **params: Any) -> list[Request]:
        return [self.request(index, **params) for index in range(len(self.prompts))]

    def check(self, outputs: Mapping[str, RequestOutput]) -> None:
        for index in range(len(self.prompts)):
            self.check_one(outputs[f"s{index}"], index)

    def check_one(self, output: RequestOutput, index: int) -> None:
        assert output.error is None, output.error
        prompt, rows, entries = self.prompts[index], self.expected[index], output.prompt_logprobs
        assert entries is not None
        assert len(entries) == len(prompt)
        assert entries[0] is None
        for position, entry in enumerate(entries[1:], start=1):
            row = rows[position - 1]
            assert entry is not None
            assert entry.token_id == prompt[position]
            assert entry.logprob == pytest.approx(float(row[entry.token_id]), abs=TOLERANCE)
            best = row.topk(NUM_TOP)
            assert [token_id for token_id, _ in entry.top] == best.indices.tolist()
            assert [logprob for _, logprob in entry.top] == pytest.approx(best.values.tolist(), abs=TOLERANCE)


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return Case(tmp_path_factory.mktemp("scored") / "tiny")


def test_together_and_nothing_is_generated(case: Case) -> None:
    engine = case.engine()
    outputs = run_all(engine, case.requests())
    case.check(outputs)
    assert engine.stats().generated_tokens == 0
    for output in outputs.values():
        (completion,) = output.completions
        assert (completion.token_ids, completion.text) == ((), "")
        assert completion.finish_reason is FinishReason.LENGTH


@pytest.mark.parametrize("tokens", ["7", "17"])
def test_in_chunks(case: Case, tokens: str) -> None:
    case.check(run_all(case.engine(max_num_batched_tokens=tokens, max_num_seqs="7"), case.requests(max_tokens=2)))


def test_a_bounded_number_of_positions_at_a_time(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = case.engine()
    scorer = PromptScorer(engine.model, max_logits_bytes=5 * VOCAB_SIZE * 4 + 3)
    logprobs_of, sizes = scorer._logprobs, []

    def observed(rows: torch.Tensor, next_ids: torch.Tensor) -> Any:
        sizes.append(rows.shape[0])
        return logprobs_of(rows, next_ids)

    monkeypatch.setattr(scorer, "_logprobs", observed)
    monkeypatch.setattr(engine._runner, "_scorer", scorer)
    case.check(run_all(engine, case.requests()))
    assert max(sizes) == 5
    assert sum(sizes) == sum(len(prompt) - 1 for prompt in case.prompts)
    assert sizes.count(5) >= len(sizes) - engine.stats().num_steps  # prompts of one step share them


def test_preempted_and_recomputed(case: Case) -> None:
    """A small pool: prompts are preempted between their chunks, and while they generate."""
    engine = case.engine(kv_cache__num_blocks="16", max_num_batched_tokens="16", max_num_seqs="8")
    for index in range(6):
        engine.add_request(greedy_request(f"g{index}", [index], 40))
    case.check(run_all(engine, case.requests(max_tokens=24, ignore_eos=True)))
    assert engine.stats().num_preemptions > 3


def test_requests_that_generate_beside_it_get_the_tokens_they_get_alone(case: Case) -> None:
    generating = [greedy_request(f"g{index}", prompt, 12) for index, prompt in enumerate(case.prompts)]
    alone = run_all(case.engine(), generating)
    engine = case.engine(max_num_batched_tokens="32", max_num_seqs="32")
    for request in generating:
        engine.add_request(request)
    outputs = run_all(engine, case.requests(max_tokens=12, ignore_eos=True))
    case.check(outputs)
    for index in range(len(case.prompts)):
        assert tokens_of(outputs[f"g{index}"]) == tokens_of(alone[f"g{index}"]) == tokens_of(outputs[f"s{index}"])


def test_a_scored_prompt_takes_nothing_from_the_prefix_cache_and_fills_it(case: Case) -> None:
    engine, longest = case.engine(), 11
    prompt = case.prompts[longest]
    run_all(engine, [greedy_request("g", prompt, 4)])
    output = run_all(engine, [case.request(longest)])[f"s{longest}"]
    case.check_one(output, longest)
    assert output.num_cached_tokens == 0
    fresh = case.engine()
    run_all(fresh, [case.request(longest)])
    after = run_all(fresh, [greedy_request("g", prompt, 4)])["g"]
    assert after.num_cached_tokens == (len(prompt) - 1) // 16 * 16 > 0


def test_it_does_not_wait_for_blocks_that_another_is_computing(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens="160")
    engine.add_request(greedy_request("first", case.prompts[11]))
    engine.add_request(case.request(11, max_tokens=1))
    engine.add_request(greedy_request("waits", case.prompts[9]))
    engine.step()
    assert engine.stats().num_running == 2


def test_several_completions_of_one_prompt_have_it_scored_once(case: Case) -> None:
    engine = case.engine()
    drawn = case.request(11, n=3, max_tokens=4, temperature=1.0, seed=3, ignore_eos=True, logprobs=0)
    output = run_all(engine, [drawn])["s11"]
    case.check_one(output, 11)
    assert [len(completion.logprobs or ()) for completion in output.completions] == [4, 4, 4]
    metrics = engine.model_interface.cache_metrics_snapshot()
    assert metrics.saved_prefill_tokens == 2 * ((len(case.prompts[11]) - 1) // 16 * 16)
    scored = run_all(engine, [case.request(11, n=3)])["s11"]
    case.check_one(scored, 11)
    assert [completion.token_ids for completion in scored.completions] == [(), (), ()]


def test_equal_requests_are_scored_once_and_others_are_not_equal(case: Case) -> None:
    engine = case.engine()
    same = [replace(case.request(5), request_id=f"same {number}") for number in range(3)]
    outputs = run_all(engine, [*same, replace(case.request(5, prompt_logprobs=0), request_id="other")])
    for request in same:
        case.check_one(outputs[request.request_id], 5)
    assert engine.stats().num_duplicates == 2
    other = outputs["other"].prompt_logprobs
    assert other is not None
    assert {entry.top for entry in other if entry is not None} == {()}


def test_of_equal_requests_one_may_be_aborted(case: Case) -> None:
    engine = case.engine(max_num_batched_tokens="16", max_num_seqs="16")
    engine.add_request(replace(case.request(11), request_id="gone"))
    engine.add_request(case.request(11))
    engine.step()
    assert engine.abort("gone")
    outputs = run_all(engine, [])
    assert outputs["gone"].was_aborted
    assert outputs["gone"].prompt_logprobs is None
    case.check_one(outputs["s11"], 11)


def test_after_a_checkpoint(case: Case) -> None:
    request = case.request(9, n=2, max_tokens=20, temperature=1.0, seed=2, ignore_eos=True)
    uninterrupted = run_all(case.engine(), [request])["s9"]
    engine = case.engine()
    engine.add_request(request)
    for _ in range(6):
        engine.step()
    resume_state = engine.resume_state("s9")
    assert resume_state is not None
    output = run_all(case.engine(), [replace(request, resume=resume_state)])["s9"]
    case.check_one(output, 9)
    assert output.num_resumed_tokens == resume_state.num_tokens > 0
    assert [c.token_ids for c in output.completions] == [c.token_ids for c in uninterrupted.completions]


def test_after_a_checkpoint_in_which_the_first_sequence_had_ended(case: Case) -> None:
    request = case.request(9, n=2, max_tokens=20, temperature=1.0, seed=2, ignore_eos=True)
    first, second = run_all(case.engine(), [request])["s9"].completions
    stop = next(token for token in first.token_ids if token not in second.token_ids)
    request = replace(request, params=replace(request.params, stop_token_ids=(stop,)))
    engine = case.engine()
    engine.add_request(request)
    for _ in range(first.token_ids.index(stop) + 3):
        engine.step()
    resume_state = engine.resume_state("s9")
    assert resume_state is not None
    assert len(resume_state.sequences[0].token_ids) < len(resume_state.sequences[1].token_ids)
    output = run_all(case.engine(), [replace(request, resume=resume_state)])["s9"]
    case.check_one(output, 9)
    assert output.num_resumed_tokens == resume_state.num_tokens


def test_bit_for_bit_with_deterministic_kernels(case: Case) -> None:
    found = []
    for tokens in ("7", "512"):
        engine = case.engine(deterministic="true", max_num_batched_tokens=tokens, max_num_seqs="7")
        outputs = run_all(engine, case.requests())
        found.append([list(outputs[f"s{index}"].prompt_logprobs or ()) for index in range(len(case.prompts))])
    assert found[0] == found[1]


def test_a_prompt_may_fill_the_context_where_nothing_follows(case: Case) -> None:
    engine = case.engine(max_model_len="60")
    index = LENGTHS.index(60) - 1  # the shared prefix is before the odd ones
    prompt = (case.prompts[index] * 4)[:60]
    output = run_all(engine, [Request("full", prompt, SamplingParams(max_tokens=0, prompt_logprobs=0))])["full"]
    assert output.prompt_logprobs is not None
    assert len(output.prompt_logprobs) == 60
    with pytest.raises(PromptTooLong):
        engine.add_request(Request("over", prompt, SamplingParams(max_tokens=1, prompt_logprobs=0)))
    with pytest.raises(PromptTooLong):
        engine.add_request(Request("over", [*prompt, 1], SamplingParams(max_tokens=0, prompt_logprobs=0)))


@pytest.mark.parametrize("prompt", [[5], list(range(40))])
def test_nothing_is_run_where_nothing_is_asked(case: Case, prompt: Sequence[int]) -> None:
    engine = case.engine()
    scored = len(prompt) == 1
    params = SamplingParams(max_tokens=0, prompt_logprobs=2 if scored else None)
    output = run_all(engine, [Request("r", prompt, params)])["r"]
    assert output.completions[0].finish_reason is FinishReason.LENGTH
    assert list(output.prompt_logprobs or ()) == ([None] if scored else [])
    assert engine.stats().num_steps == 0


def test_values_that_are_not_finite_fail_that_request_alone(tmp_path: Path) -> None:
    """Token 300 spoils its own position and all after it."""
    case = Case(tmp_path / "tiny")
    case.prompts[7][40] = 300
    engine = case.engine(max_num_batched_tokens="16", max_num_seqs="16")
    engine.model.embed_tokens.tensor[300] = torch.nan
    outputs = run_all(engine, case.requests())
    spoilt = outputs["s7"]
    assert isinstance(spoilt.error, NonFiniteLogits)
    assert spoilt.prompt_logprobs is None
    for index in set(range(len(case.prompts))) - {7}:
        case.check_one(outputs[f"s{index}"], index)


def test_one_position_not_finite_fails_a_request_whose_last_is_good(
    case: Case, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = case.engine()
    score = PromptScorer.score

    def spoilt(
        scorer: PromptScorer, prompts: Sequence[tuple[PromptLogprobs, int, torch.Tensor]]
    ) -> PendingResult[list[bool]]:
        result, is_other = score(scorer, prompts), [entries.token_ids != case.prompts[8] for entries, _, _ in prompts]
        return replace(result, read=lambda on_host: [*map(and_, result.read(on_host), is_other)])

    monkeypatch.setattr(PromptScorer, "score", spoilt)
    outputs = run_all(engine, [case.request(8, max_tokens=3), case.request(10, max_tokens=3, ignore_eos=True)])
    assert isinstance(outputs["s8"].error, NonFiniteLogits)
    assert (outputs["s8"].completions, outputs["s8"].prompt_logprobs) == ((), None)
    case.check_one(outputs["s10"], 10)
    assert len(tokens_of(outputs["s10"])) == 3


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> DecoderModel:
    return load_engine(make_checkpoint(tmp_path_factory.mktemp("scorer") / "tiny", "qwen3")).model


def test_one_position_that_is_not_finite_is_enough(model: DecoderModel) -> None:
    hidden = torch.randn(9, model.config.hidden_size)
    hidden[3, 0] = torch.nan
    spoilt, good = (PromptLogprobs(list(range(10)), 1) for _ in range(2))
    scorer = PromptScorer(model, max_logits_bytes=8 * VOCAB_SIZE)
    assert scorer.score([(spoilt, 0, hidden), (good, 0, hidden[4:])]).now() == [False, True]
    assert good.num_scored == 5
    assert not spoilt.is_complete


def test_a_position_that_was_left_out_is_noticed(model: DecoderModel) -> None:
    hidden = torch.randn(2, model.config.hidden_size)
    with pytest.raises(EngineFatal, match="positions 0 to 3"):
        PromptScorer(model).score([(PromptLogprobs(list(range(10)), 1), 4, hidden)])


def test_positions_already_scored_or_behind_the_prompt_are_left_out(model: DecoderModel) -> None:
    hidden = torch.randn(12, model.config.hidden_size)
    whole, pieces = (PromptLogprobs(list(range(10)), 2) for _ in range(2))
    scorer = PromptScorer(model)
    assert scorer.score([(whole, 0, hidden)]).now() == [True]
    for start, end in ((0, 4), (0, 3), (2, 6), (0, 12), (9, 12)):
        assert scorer.score([(pieces, start, hidden[start:end])]).now() == [True]
    for one, other in zip(whole, pieces, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.logprob == pytest.approx(other.logprob, abs=1e-5)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


def test_no_more_alternatives_than_the_vocabulary_has(model: DecoderModel) -> None:
    entries = PromptLogprobs([1, 2, 3], 1000)
    assert PromptScorer(model).score([(entries, 0, torch.randn(3, model.config.hidden_size))]).now() == [True]
    first, *others = entries
    assert first is None
    for entry in others:
        assert entry is not None
        assert len(dict(entry.top)) == VOCAB_SIZE
        assert dict(entry.top)[entry.token_id] == entry.logprob
    assert entries[-1] == others[-1]
    assert entries[1:] == others
