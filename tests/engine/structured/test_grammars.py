"""Output constrained by a grammar: what it may be, where it ends, and requests that wait for their grammar."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.errors import InvalidRequest
from engine.request import Completion, FinishReason
from engine.sampling_params import SamplingParams
from engine.structured.grammar import Grammar
from tests.support.engines import load_engine, run_all
from tests.support.grammars import POINT, GatedTrials, grammar_request, schema_grammar

A_WORD = Grammar("regex", "[abc]{3,6}")
LETTERS = Grammar("regex", "[a-z ]*")


@pytest.fixture(scope="module")
def small_pool(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_model, {"engine.kv_cache.num_blocks": "16", "engine.deterministic": "true"})
    yield engine
    engine.close()


def _completion(engine: Engine, grammar: Grammar, **params: Any) -> Completion:
    output = run_all(engine, [grammar_request("r", grammar, **params)])["r"]
    assert output.error is None, output.error
    return output.completions[0]


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize(
    ("grammar", "pattern"),
    [
        (Grammar("regex", "[a-c]{3}-[0-9]{2}"), "[a-c]{3}-[0-9]{2}"),
        (
            Grammar("choice", json.dumps(["the you", 'a"\u00e9\n', "\\d+", "<|im_end|>"])),
            'the you|a"\u00e9\n|\\\\d\\+|<\\|im_end\\|>',
        ),
        (Grammar("lark", 'start: "x" start | "y"'), "x*y"),
        (Grammar("lark", 'root ::= item ("," item)? ";"\nitem ::= [0-9] [0-9]'), "[0-9]{2}(,[0-9]{2})?;"),
    ],
    ids=["regex", "choice", "lark", "gbnf"],
)
def test_a_text_is_what_its_grammar_says(engine: Engine, grammar: Grammar, pattern: str, seed: int) -> None:
    completion = _completion(engine, grammar, seed=seed, temperature=2.0)
    assert completion.finish_reason is FinishReason.STOP
    assert re.fullmatch(pattern, completion.text), completion.text


def test_any_json_object_is_an_object(engine: Engine) -> None:
    """A bias towards closing what was opened, for a model that would never end."""
    closing = dict.fromkeys((engine.tokenizer.encode(text)[0] for text in '"}]'), 12.0)
    output = run_all(
        engine, [grammar_request("r", Grammar("json_object", ""), n=6, max_tokens=60, logit_bias=closing)]
    )["r"]
    ended = [completion for completion in output.completions if completion.finish_reason is FinishReason.STOP]
    assert len(ended) >= 3
    assert all(isinstance(json.loads(completion.text), dict) for completion in ended)
    assert all(completion.text.startswith("{") for completion in output.completions)


def test_a_text_that_can_only_end_ends_without_a_further_token(engine: Engine) -> None:
    completion = _completion(engine, Grammar("choice", '["the"]'))
    assert (completion.text, completion.finish_reason, completion.stop_reason) == ("the", FinishReason.STOP, None)
    assert not engine.eos_token_ids.intersection(completion.token_ids)


def test_an_end_of_sequence_comes_only_where_the_grammar_is_satisfied(engine: Engine) -> None:
    """A bias that would end every text at once."""
    bias = dict.fromkeys(engine.eos_token_ids, 100.0)
    completion = _completion(engine, A_WORD, logit_bias=bias, temperature=0.0)
    assert len(completion.text) == 3
    assert completion.token_ids[-1] in engine.eos_token_ids


def test_a_stop_token_id_ends_only_where_the_grammar_is_satisfied(engine: Engine) -> None:
    stop = engine.tokenizer.encode("z")[0]
    completion = _completion(engine, A_WORD, logit_bias={stop: 100.0}, temperature=0.0, stop_token_ids=(stop,))
    assert (len(completion.text), completion.stop_reason) == (3, stop)


def test_a_stop_string_cuts_the_text_wherever_it_appears(engine: Engine) -> None:
    completion = _completion(engine, Grammar("choice", '["the you are"]'), stop=(" you",))
    assert (completion.text, completion.stop_reason) == ("the", " you")


def test_max_tokens_ends_a_text_that_is_not_whole(engine: Engine) -> None:
    completion = _completion(engine, LETTERS, max_tokens=4, logit_bias=dict.fromkeys(engine.eos_token_ids, -100.0))
    assert completion.finish_reason is FinishReason.LENGTH
    assert len(completion.token_ids) == 4


def test_an_empty_text_is_one_if_the_grammar_says_so(engine: Engine) -> None:
    assert _completion(engine, Grammar("regex", "")).text == ""


@pytest.mark.parametrize(("param", "value"), [("min_tokens", 3), ("ignore_eos", True)])
def test_what_would_move_the_end_is_refused_beside_a_grammar(param: str, value: object) -> None:
    options: dict[str, Any] = {param: value}
    with pytest.raises(InvalidRequest) as caught:
        SamplingParams(grammar=A_WORD, **options)
    assert caught.value.param == param


def test_penalties_and_truncation_choose_among_what_the_grammar_allows(engine: Engine) -> None:
    completion = _completion(
        engine,
        A_WORD,
        repetition_penalty=1.5,
        presence_penalty=1.0,
        top_k=2,
        top_p=0.9,
        min_p=0.1,
        logit_bias={0: 50.0},
    )
    assert re.fullmatch("[abc]{3,6}", completion.text)


def test_log_probabilities_are_those_of_the_model(engine: Engine) -> None:
    completion = _completion(engine, Grammar("choice", '["the"]'), logprobs=1)
    assert completion.logprobs is not None
    assert completion.logprobs[0].token_id == completion.token_ids[0]
    assert completion.logprobs[0].logprob < -0.01, "the grammar left one token: its own probability would be 1"


def test_each_of_n_sequences_stands_by_itself_in_the_grammar(engine: Engine) -> None:
    output = run_all(engine, [grammar_request("r", schema_grammar(POINT), n=6, temperature=1.5)])["r"]
    texts = [completion.text for completion in output.completions]
    assert len(set(texts)) > 1
    assert all(json.loads(text).keys() == {"x", "y"} for text in texts)


def test_the_same_text_comes_after_preemptions(small_pool: Engine) -> None:
    grammar = Grammar("regex", "[a-z]{60}")
    requests = [grammar_request(f"r{i}", grammar, (i, *range(30)), temperature=0.0) for i in range(4)]
    before = small_pool.stats().num_preemptions
    together = run_all(small_pool, requests)
    assert small_pool.stats().num_preemptions > before
    alone = {request.request_id: run_all(small_pool, [request])[request.request_id] for request in requests}
    for name, output in together.items():
        assert output.completions == alone[name].completions
        assert re.fullmatch("[a-z]{60}", output.completions[0].text)


@pytest.mark.parametrize("num_tokens", [1, 7, 20])
def test_a_request_goes_on_from_a_checkpoint_where_it_stood_in_its_grammar(engine: Engine, num_tokens: int) -> None:
    request = grammar_request("r", Grammar("regex", "(ab|cd)+;[0-9]{6}"), n=2, temperature=1.0)
    whole = run_all(engine, [request])["r"]
    engine.add_request(request)
    resume_state = engine.resume_state("r")
    while resume_state is None or resume_state.num_tokens < num_tokens:
        assert engine.step() == []
        resume_state = engine.resume_state("r")
    engine.abort("r")
    engine.step()
    resumed = run_all(engine, [replace(request, resume=resume_state)])["r"]
    assert resumed.completions == whole.completions
    assert resumed.num_resumed_tokens == resume_state.num_tokens


def test_a_prompt_is_scored_after_a_resume_with_one_sequence_ended(
    engine: Engine,
) -> None:
    """Only the compiled grammar tells that it had ended, and by then its sequences are there."""
    params: dict[str, Any] = {"n": 2, "temperature": 1.0, "prompt_logprobs": 1}
    probes = (grammar_request("r", Grammar("regex", "x|y{12}"), seed=seed, **params) for seed in range(50))
    request, whole = next(
        (probe, output)
        for probe, output in ((probe, run_all(engine, [probe])["r"]) for probe in probes)
        if [len(completion.text) for completion in output.completions] == [1, 12]
    )
    engine.add_request(request)
    while (resume_state := engine.resume_state("r")) is None or resume_state.num_tokens < 5:
        assert engine.step() == []
    engine.abort("r")
    engine.step()
    resumed = run_all(engine, [replace(request, resume=resume_state)])["r"]
    assert resumed.completions == whole.completions
    assert resumed.num_resumed_tokens == resume_state.num_tokens
    assert whole.prompt_logprobs is not None
    assert resumed.prompt_logprobs is not None
    found, expected = ([entry.logprob for entry in o.prompt_logprobs or () if entry] for o in (resumed, whole))
    assert len(expected) == len(request.prompt_token_ids) - 1
    assert found == pytest.approx(expected, abs=1e-4)


def test_equal_requests_are_computed_once_unless_their_grammars_differ(engine: Engine) -> None:
    before = engine.stats()
    outputs = run_all(
        engine,
        [
            grammar_request("a", Grammar("regex", "[ab]{40}", "guided_regex")),
            grammar_request("b", Grammar("regex", "[ab]{40}", "guided_regex")),
            grammar_request("c", Grammar("regex", "[ab]{41}")),
        ],
    )
    after = engine.stats()
    assert outputs["a"].completions == outputs["b"].completions
    assert len(outputs["c"].completions[0].text) == 41
    assert after.num_duplicates - before.num_duplicates == 1


def test_a_request_aborted_while_its_grammar_is_compiled_ends_at_once(engine: Engine) -> None:
    engine.add_request(grammar_request("r", Grammar("regex", "never seen [0-9]+")))
    assert engine.stats().num_waiting == 1
    assert engine.abort("r")
    assert [output.completions[0].finish_reason for output in engine.step()] == [FinishReason.CANCELLED]
    assert not engine.has_unfinished()
    engine.check_integrity()


def test_a_more_urgent_duplicate_makes_a_waiting_request_as_urgent(engine: Engine) -> None:
    grammar = Grammar("regex", "[ab]{5}xyz")
    slow = grammar_request("slow", grammar)
    urgent = replace(slow, request_id="urgent", priority=-3)
    outputs = run_all(engine, [slow, urgent])
    assert outputs["slow"].completions == outputs["urgent"].completions


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_model)
    yield engine
    engine.close()


def test_a_grammar_is_compiled_as_long_as_somebody_waits_for_it(
    engine: Engine, monkeypatch: pytest.MonkeyPatch
) -> None:
    trials = GatedTrials(monkeypatch)
    for name, text, seed in [("first", "x1", 1), ("a", "x2", 1), ("b", "x2", 2), ("c", "x3", 1), ("d", "x4", 1)]:
        engine.add_request(grammar_request(name, Grammar("regex", text), seed=seed))
    trials.wait_begun()
    assert engine.abort("a")
    assert engine.abort("c")
    engine.add_request(grammar_request("late", Grammar("regex", "x5")))
    trials.go_on()
    assert _texts(engine) == {"first": "x1", "a": "", "b": "x2", "c": "", "d": "x4", "late": "x5"}
    assert trials.tried == ["x1", "x2", "x4", "x5"]
    engine.add_request(grammar_request("again", Grammar("regex", "x3")))
    assert _texts(engine) == {"again": "x3"}


def _texts(engine: Engine) -> dict[str, str]:
    texts: dict[str, str] = {}
    while engine.has_unfinished():
        texts |= {output.request_id: output.completions[0].text for output in engine.step()}
    return texts


def test_an_aborted_equal_keeps_the_end_its_grammar_gave_a_sequence(engine: Engine) -> None:
    # Two sequences of the same draws in each engine run: one that is over at once, one that goes on for long.
    either = Grammar("regex", "x|y{20}")
    seed = next(seed for seed, lengths in _lengths(engine, either, range(20)).items() if lengths == {1, 20})
    for name in ("runs", "leaves"):
        engine.add_request(grammar_request(name, either, seed=seed, n=2))
    while engine.stats().num_running + engine.stats().num_waiting != 1:  # until the first sequence is over
        engine.step()
    assert engine.abort("leaves")
    (left,) = [output for output in engine.step() if output.request_id == "leaves"]
    ended = {completion.text: completion.finish_reason for completion in left.completions}
    assert ended.pop("x") is FinishReason.STOP
    assert list(ended.values()) == [FinishReason.CANCELLED]
    assert "runs" in _texts(engine)


@pytest.fixture(scope="module")
def one_at_a_time(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_model, {"engine.max_num_seqs": "1", "engine.checkpoint_tokens": "1"})
    yield engine
    engine.close()


def test_a_grammar_that_ends_with_the_last_token_is_a_stop_when_resumed(one_at_a_time: Engine) -> None:
    engine = one_at_a_time
    request = grammar_request("r", Grammar("regex", "[a-d][x-z][m-p]"), n=2, max_tokens=3, temperature=1.0, seed=1)
    whole = run_all(engine, [request])["r"]
    assert [completion.finish_reason for completion in whole.completions] == [FinishReason.STOP] * 2
    engine.add_request(request)
    while (resume_state := engine.resume_state("r")) is None or len(resume_state.sequences[0].token_ids) < 3:
        assert engine.step() == []
    engine.add_request(replace(request, request_id="equal"))
    engine.abort("equal")
    (equal,) = engine.step()
    assert equal.completions[0] == whole.completions[0]
    engine.abort("r")
    engine.step()
    resumed = run_all(engine, [replace(request, resume=resume_state)])["r"]
    assert resumed.completions == whole.completions


def _lengths(engine: Engine, grammar: Grammar, seeds: Iterable[int]) -> dict[int, set[int]]:
    outputs = run_all(engine, [grammar_request(str(seed), grammar, seed=seed, n=2) for seed in seeds])
    return {int(name): {len(completion.text) for completion in output.completions} for name, output in outputs.items()}
