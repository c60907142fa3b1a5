"""A request that goes on from its resume state ends exactly like one that was not interrupted."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import Completion, FinishReason, Request, ResumeState, SequenceResumeState
from engine.sampling_params import SamplingParams
from tests.support.engines import interrupted, load_engine, run_all

PROMPT = tuple(range(30))
MAX_TOKENS = 48
GREEDY: dict[str, Any] = {"temperature": 0.0}
DRAWN: dict[str, Any] = {"temperature": 1.0, "top_p": 0.9, "seed": 7}

Undisturbed = Callable[[Request], Sequence[Completion]]

CASES: dict[str, dict[str, Any]] = {
    "greedy": GREEDY,
    "seeded": DRAWN,
    "logprobs": GREEDY | {"logprobs": 3},
    "penalties": DRAWN | {"repetition_penalty": 1.2, "presence_penalty": 0.5, "frequency_penalty": 0.7},
    "logit bias": GREEDY | {"logit_bias": {42: 5.0, 43: 4.0}, "frequency_penalty": 1.0},
    "three completions": DRAWN | {"n": 3, "logprobs": 0},
    "min tokens": {"temperature": 0.0, "min_tokens": 30, "stop_token_ids": (65, 66, 67, 68)},
}


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Engine:
    return load_engine(tiny_model)


@pytest.fixture(scope="module")
def other(tiny_model: Path) -> Engine:
    """Another engine, as of another worker."""
    return load_engine(tiny_model)


@pytest.fixture(scope="module")
def undisturbed(engine: Engine) -> Undisturbed:
    """The completions of a request that is not interrupted; computed once for equal ones."""
    known: dict[str, Sequence[Completion]] = {}

    def run(request: Request) -> Sequence[Completion]:
        key = repr(request)
        if key not in known:
            known[key] = run_all(engine, [request])["r"].completions
        return known[key]

    return run


def _request(**params: Any) -> Request:
    options: Mapping[str, Any] = {"max_tokens": MAX_TOKENS, "ignore_eos": True} | params
    return Request("r", PROMPT, SamplingParams(**options))


def _assert_same(
    found: Sequence[Completion], expected: Sequence[Completion], resume_state: ResumeState | None = None
) -> None:
    """Equal to the byte, except for rounding in the logprobs after the resume state: another batch computed them."""
    assert [replace(completion, logprobs=None) for completion in found] == [
        replace(completion, logprobs=None) for completion in expected
    ]
    for index, (one, two) in enumerate(zip(found, expected, strict=True)):
        assert (one.logprobs is None) == (two.logprobs is None)
        kept = resume_state.sequences[index].logprobs or () if resume_state else ()
        assert (one.logprobs or ())[: len(kept)] == kept
        for mine, theirs in zip(one.logprobs or (), two.logprobs or (), strict=True):
            assert mine.logprob == pytest.approx(theirs.logprob, abs=1e-3)


def _generated(engine: Engine) -> int:
    return engine.stats().generated_tokens


@pytest.mark.parametrize("at", [1, 18, 19, MAX_TOKENS - 1])  # 30 + 18 tokens fill three blocks of 16
@pytest.mark.parametrize("case", CASES)
def test_a_resumed_request_ends_as_an_undisturbed_one(
    engine: Engine, other: Engine, undisturbed: Undisturbed, case: str, at: int
) -> None:
    request = _request(**CASES[case])
    expected = undisturbed(request)
    resume_state = interrupted(engine, request, min(at, *(len(completion.token_ids) - 1 for completion in expected)))
    before = _generated(other)
    found = run_all(other, [replace(request, resume=resume_state)])["r"]
    _assert_same(found.completions, expected, resume_state)
    total = sum(len(completion.token_ids) for completion in expected)
    assert _generated(other) - before == total - resume_state.num_tokens
    assert found.num_resumed_tokens == resume_state.num_tokens
    assert found.num_prompt_tokens == len(PROMPT)
    assert found.num_cached_tokens <= len(PROMPT)


def _texts(engine: Engine, params: Mapping[str, Any]) -> Iterator[tuple[int, str]]:
    """The texts of seeds 0 to 49."""
    for first in range(0, 50, 5):
        some = [replace(_request(**params, seed=seed), request_id=str(seed)) for seed in range(first, first + 5)]
        for name, output in run_all(engine, some).items():
            yield int(name), output.completions[0].text


def test_stop_strings_and_wide_characters_end_the_same_at_every_split(tiny_model: Path, engine: Engine) -> None:
    # Drawn from four bytes: "é" is two tokens, the stop string four, so that some split lies inside of each.
    bias = dict.fromkeys(engine.tokenizer.encode("aéb", add_special_tokens=False), 100.0)
    params: dict[str, Any] = {"temperature": 12.0, "logit_bias": bias}
    texts = _texts(engine, params)
    seed, found = next((seed, match) for seed, text in texts if (match := re.search(".{5}(.é.)", text)))
    request = _request(**params | {"seed": seed, "stop": (found[1], "never")})
    (expected,) = run_all(engine, [request])["r"].completions
    assert expected.stop_reason == found[1]
    engine.add_request(request)
    resumed = []
    for at in range(1, len(expected.token_ids)):
        assert engine.step() == []
        resumed.append(replace(request, request_id=str(at), resume=engine.resume_state("r")))
    run_all(engine, [])
    outputs = run_all(load_engine(tiny_model, {"engine.deduplicate": "off"}), resumed)
    for at in range(1, len(expected.token_ids)):
        assert (outputs[str(at)].completions, outputs[str(at)].num_resumed_tokens) == ((expected,), at)


def test_an_unseeded_request_goes_on_with_the_draws_it_began_with(engine: Engine, other: Engine) -> None:
    request = _request(temperature=1.0)
    resume_state = interrupted(engine, request, 10)
    resumed = replace(request, resume=resume_state)
    first, second = (run_all(target, [resumed])["r"].completions[0].token_ids for target in (engine, other))
    assert first == second
    assert first[:10] == resume_state.sequences[0].token_ids
    fresh = run_all(other, [replace(request, params=replace(request.params, seed=resume_state.base_seed))])["r"]
    assert fresh.completions[0].token_ids == first


def test_a_completion_that_had_ended_is_not_generated_again(engine: Engine, other: Engine) -> None:
    plain = run_all(engine, [_request(**DRAWN | {"n": 3})])["r"].completions
    stop = plain[1].token_ids[4]
    request = _request(**DRAWN | {"n": 3, "stop_token_ids": (stop,)})
    expected = run_all(engine, [request])["r"].completions
    ended = [len(completion.token_ids) for completion in expected if completion.finish_reason is FinishReason.STOP]
    at = max(length for length in ended if length < MAX_TOKENS - 1) + 1
    assert any(len(completion.token_ids) > at for completion in expected)
    resume_state = interrupted(engine, request, at)
    before = _generated(other)
    assert run_all(other, [replace(request, resume=resume_state)])["r"].completions == expected
    total = sum(len(completion.token_ids) for completion in expected)
    assert _generated(other) - before == total - resume_state.num_tokens


def test_a_resume_state_with_nothing_left_is_handed_out_at_once(engine: Engine, other: Engine) -> None:
    request = _request(**GREEDY)
    (expected,) = run_all(engine, [request])["r"].completions
    resume_state = interrupted(engine, request, 5)
    whole = replace(resume_state, sequences=(SequenceResumeState(expected.token_ids, None),))
    assert run_all(other, [replace(request, resume=whole)])["r"].completions == (expected,)


def test_resumed_requests_are_preempted_and_resumed_once_more(tiny_model: Path, engine: Engine) -> None:
    requests = [
        Request(str(i), (i, *PROMPT), SamplingParams(max_tokens=60, ignore_eos=True, **DRAWN)) for i in range(8)
    ]
    expected = {name: output.completions for name, output in run_all(engine, requests).items()}
    for request in requests:
        engine.add_request(request)
    for _ in range(20):
        engine.step()
    resume_states = {request.request_id: engine.resume_state(request.request_id) for request in requests}
    for request in requests:
        engine.abort(request.request_id)
    engine.step()
    tight = load_engine(tiny_model, {"engine.kv_cache.num_blocks": "20"})
    for request in requests:
        tight.add_request(replace(request, resume=resume_states[request.request_id]))
    for _ in range(15):
        assert tight.step() == []
    again = [replace(request, resume=tight.resume_state(request.request_id)) for request in requests]
    tight.close()
    tight.step()
    found = run_all(tight, again)
    assert {name: output.completions for name, output in found.items()} == expected
    assert tight.stats().num_preemptions > 0


def test_a_resume_state_is_due_every_so_many_tokens_of_a_sequence(tiny_model: Path) -> None:
    engine = load_engine(tiny_model, {"engine.checkpoint_tokens": "8"})
    engine.add_request(_request(**DRAWN | {"n": 2}))
    seen = []
    while engine.has_unfinished():
        engine.step()
        seen += [resume_state.num_tokens for resume_state in engine.due_resume_states().values()]
    # Both sequences are saved whenever the first has 8 more tokens; the second began a step later. The request ends
    # with the second's last token, and nothing is due for what has ended.
    assert seen == [15, 31, 47, 63, 79, 95]
    assert engine.due_resume_states() == {}


def test_a_resume_state_can_be_taken_when_it_is_not_due(engine: Engine) -> None:
    engine.add_request(_request(**GREEDY))
    assert engine.resume_state("r") is None  # nothing generated yet
    assert engine.resume_state("nobody") is None
    engine.step()
    resume_state = engine.resume_state("r")
    assert resume_state is not None
    assert resume_state.num_tokens == 1
    run_all(engine, [])


def test_without_the_setting_no_resume_state_is_taken_but_one_is_used(tiny_model: Path, engine: Engine) -> None:
    off = load_engine(tiny_model, {"engine.checkpoint_tokens": "none"})
    request = _request(**GREEDY)
    expected = run_all(engine, [request])["r"].completions
    off.add_request(replace(request, resume=interrupted(engine, request, 40)))
    while off.has_unfinished():
        outputs = off.step()
        assert (off.due_resume_states(), off.resume_state("r")) == ({}, None)
    assert outputs[0].completions == expected
    assert _generated(off) == MAX_TOKENS - 40
