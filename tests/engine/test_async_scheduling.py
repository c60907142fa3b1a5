"""Steps scheduled one ahead give every request what it gets from steps that are waited for."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.request import AnyRequest, EmbeddingRequest, FinishReason, Request, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import ScheduledBatch, Scheduler
from engine.structured.grammar import Grammar
from tests.support.engines import load_engine, run_all
from tests.support.static_runner import StaticRunner, load_static_engine

NUM_REQUESTS = 20
TOLERANCE = 1e-3  # of log-probabilities: the other rows of a batch change the rounding

SHAPES: dict[str, dict[str, object]] = {
    "roomy": {},
    "preempted, in chunks": {
        "engine.kv_cache.num_blocks": "14",
        "engine.max_num_batched_tokens": "24",
        "engine.max_num_seqs": "8",
    },
    "prefill and decode apart, nothing shared": {
        "engine.prefix_cache.enabled": "off",
        "engine.unified_prefill": "off",
        "engine.deduplicate": "off",
        "engine.kv_cache.num_blocks": "40",
    },
    "deterministic": {"engine.deterministic": "on", "engine.max_num_seqs": "8"},
}


def _params(rng: random.Random, eos: int) -> SamplingParams:
    max_tokens = rng.choice([1, 2, 20, 40])
    options: dict[str, Any] = {"max_tokens": max_tokens, "temperature": 0.0}
    if rng.random() < 0.6:
        options |= {"temperature": 1.0, "seed": rng.randrange(100), "top_p": rng.choice([0.8, 1.0])}
    kind = rng.choice([*["plain"] * 5, "eos", "stop", "penalties", "grammar", "n", "logprobs", "scored", "stop id"])
    kinds: dict[str, dict[str, Any]] = {
        "plain": {"ignore_eos": True},
        "eos": {"logit_bias": {eos: 12.0}, "min_tokens": rng.randint(0, max_tokens)},
        "stop": {"stop": ("a", "\ufffd"), "min_tokens": rng.randint(0, max_tokens)},
        "penalties": {"repetition_penalty": 1.3, "frequency_penalty": 0.4},
        "grammar": {"grammar": Grammar("regex", "[a-f]{3,9}")},
        "n": {"n": 3},
        "logprobs": {"logprobs": rng.choice([0, 2])},
        "scored": {"prompt_logprobs": 1, "max_tokens": rng.choice([0, 5])},
        "stop id": {"stop_token_ids": tuple(range(0, 320, 9))},
    }
    return SamplingParams(**options | kinds[kind])


def _requests(seed: int, eos: int) -> list[AnyRequest]:
    rng = random.Random(seed)
    shared = [rng.randrange(256) for _ in range(40)]
    requests: list[AnyRequest] = []
    for number in range(NUM_REQUESTS):
        prompt = shared[: rng.choice([0, 0, 20, 40])] + [rng.randrange(256) for _ in range(rng.randint(1, 30))]
        priority, tenant = rng.choice([0, 0, 1]), rng.choice(["", "", "x"])
        if rng.random() < 0.15:
            requests.append(EmbeddingRequest(f"r{number}", [prompt, prompt[::-1]], None, priority, tenant))
        elif requests and isinstance(requests[-1], Request) and rng.random() < 0.2:
            equal = requests[-1]
            requests.append(Request(f"r{number}", equal.prompt_token_ids, equal.params, priority, equal.tenant))
        else:
            requests.append(Request(f"r{number}", tuple(prompt), _params(rng, eos), priority, tenant))
    return requests


def _run(engine: Engine, requests: Sequence[AnyRequest], aborted: Sequence[str], seed: int) -> dict[str, RequestOutput]:
    """Requests come in while others run; each of `aborted` is cancelled at some step."""
    rng, outputs, waiting = random.Random(seed), dict[str, RequestOutput](), list(requests)
    doomed = list(aborted)
    while waiting or doomed:
        for request in waiting[: (count := rng.randint(1, 5))]:
            engine.add_request(request)
        waiting = waiting[count:]
        for name in [name for name in doomed if rng.random() < 0.4]:
            if engine.abort(name) or name in outputs:
                doomed.remove(name)
        for _ in range(rng.randint(1, 4)):
            outputs |= {output.request_id: output for output in engine.step()}
            engine.check_integrity()
    return outputs | run_all(engine, [])


def _check(found: RequestOutput, expected: RequestOutput, *, may_be_cut: bool) -> None:
    assert (found.error, found.num_prompt_tokens) == (None, expected.num_prompt_tokens)
    for vector, other in zip(found.embeddings or (), expected.embeddings or (), strict=not may_be_cut):
        assert list(vector) == pytest.approx(list(other), abs=TOLERANCE)
    for mine, theirs in zip(found.completions, expected.completions, strict=True):
        if may_be_cut and mine.finish_reason is FinishReason.CANCELLED:
            assert mine.token_ids == theirs.token_ids[: len(mine.token_ids)]
            assert theirs.text.startswith(mine.text.rstrip("\ufffd"))
        else:
            assert (mine.token_ids, mine.text) == (theirs.token_ids, theirs.text)
            assert (mine.finish_reason, mine.stop_reason) == (theirs.finish_reason, theirs.stop_reason)
        _check_scores(mine.logprobs or (), (theirs.logprobs or ())[: len(mine.logprobs or ())])
    if found.prompt_logprobs is not None or not may_be_cut:
        _check_scores(found.prompt_logprobs or (), expected.prompt_logprobs or ())


def _check_scores(mine: Sequence[TokenLogprobs | None], theirs: Sequence[TokenLogprobs | None]) -> None:
    for one, other in zip(mine, theirs, strict=True):
        assert (one is None) == (other is None)
        if one is not None and other is not None:
            assert one.token_id == other.token_id
            assert one.logprob == pytest.approx(other.logprob, abs=TOLERANCE)
            assert [token_id for token_id, _ in one.top] == [token_id for token_id, _ in other.top]


@pytest.fixture
def ahead(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of every step that was asked for while one was under way, whether it was scheduled ahead."""
    seen: list[bool] = []
    schedule = Scheduler.schedule

    def noted(scheduler: Scheduler, *, is_ahead: bool = False) -> ScheduledBatch | None:
        batch = schedule(scheduler, is_ahead=is_ahead)
        if is_ahead:
            seen.append(batch is not None)
        return batch

    monkeypatch.setattr(Scheduler, "schedule", noted)
    return seen


@pytest.mark.parametrize("shape", SHAPES)
def test_outputs_and_usage_are_those_of_steps_that_are_waited_for(
    tiny_model: Path, shape: str, ahead: list[bool]
) -> None:
    options = SHAPES[shape]
    off, on = load_engine(tiny_model, options), load_engine(tiny_model, options | {"engine.async_scheduling": "on"})
    requests = _requests(1, next(iter(off.eos_token_ids)))
    expected = _run(off, requests, [], 1)
    assert ahead == []
    found = _run(on, requests, [], 2)
    assert sum(ahead) > 0.25 * len(ahead) > 0
    assert found.keys() == expected.keys()
    for name, output in found.items():
        _check(output, expected[name], may_be_cut=False)
    assert off.stats().output_tokens == on.stats().output_tokens
    assert on.stats().generated_tokens == off.stats().generated_tokens or options.get("engine.deduplicate") != "off"
    assert on.stats().num_preemptions > 0 or shape != "preempted, in chunks"
    doomed = random.Random(3).sample(sorted(found), 7)
    for name, output in _run(on, requests, doomed, 4).items():
        _check(output, expected[name], may_be_cut=name in doomed)


def test_captured_decode_steps_read_the_tokens_of_the_step_before(tiny_model: Path, ahead: list[bool]) -> None:
    options: dict[str, object] = {"engine.max_model_len": "64", "engine.kv_cache.num_blocks": "40"}
    requests = [
        Request(f"r{i}", tuple(range(i, 20)), SamplingParams(max_tokens=9 + i, seed=i, ignore_eos=True))
        for i in range(6)
    ]
    expected = run_all(load_engine(tiny_model, options), requests)
    backend = StaticRunner()
    found = run_all(load_static_engine(tiny_model, backend, options | {"engine.async_scheduling": "on"}), requests)
    assert {name: o.completions for name, o in found.items()} == {n: o.completions for n, o in expected.items()}
    assert len(backend.replays) >= 12
    assert sum(ahead) >= 10
