"""A step scheduled while the one before is under way gives the same results as one that waits for it."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from engine.engine import Engine
from engine.kv_cache.block_manager import BlockManager
from engine.request import AnyRequest, EmbeddingRequest, FinishReason, Request, RequestOutput, TokenLogprobs
from engine.sampling_params import SamplingParams
from engine.scheduling.scheduler import ScheduledBatch, Scheduler
from engine.scheduling.sequence import RequestState, TokenCounts
from engine.scheduling.waiting_queue import SchedulerLimits
from engine.structured.grammar import Grammar
from tests.support.engines import StaticRunner, load_engine, load_static_engine, make_request, make_state, run_all

BLOCK = 4

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


class Harness:
    """A scheduler whose model answers token 7 when told to."""

    def __init__(self, *, num_blocks: int = 65, tokens: int = 16) -> None:
        self.blocks = BlockManager(num_blocks, BLOCK, prefix_caching=True)
        self.scheduler = Scheduler(SchedulerLimits(8, tokens, True), self.blocks)
        self._arrivals = 0

    def add(self, name: str, prompt_len: int, *, first: int = 0, max_tokens: int = 8) -> RequestState:
        self._arrivals += 1
        request = make_request(name, range(first, first + prompt_len), max_tokens=max_tokens)
        state = make_state(request, self.blocks, self._arrivals)
        self.scheduler.add(state)
        return state

    def schedule(self, *, is_ahead: bool = True) -> ScheduledBatch:
        batch = self.scheduler.schedule(is_ahead=is_ahead)
        assert batch is not None
        self.scheduler.check_integrity()
        return batch

    def collect(self, batch: ScheduledBatch) -> None:
        self.scheduler.commit(batch.items)
        for item in batch.items:
            if item.samples and not item.state.is_finished:
                item.state.token_ids.append(7)
        self.scheduler.check_integrity()


def _places(batch: ScheduledBatch) -> dict[str, tuple[int, int]]:
    return {item.state.request.request_id: (item.start, item.num_scheduled_tokens) for item in batch.items}


def test_a_pending_token_is_scheduled_by_its_place_and_one_at_a_time() -> None:
    harness = Harness()
    state = harness.add("a", 6)
    first = harness.schedule(is_ahead=False)
    second = harness.schedule()
    assert (_places(first), _places(second)) == ({"a": (0, 6)}, {"a": (6, 1)})
    harness.collect(first)
    third = harness.schedule()
    assert _places(third) == {"a": (7, 1)}
    harness.collect(second)
    harness.collect(third)
    assert (len(state.token_ids), state.num_pending_tokens, state.num_uncomputed_tokens) == (9, 0, 1)


def test_a_prompt_goes_on_before_its_last_chunk_is_known_to_be_good() -> None:
    harness = Harness(tokens=8)
    harness.add("a", 20)
    batches = [harness.schedule(is_ahead=False), harness.schedule()]
    harness.collect(batches[0])
    batches.append(harness.schedule())
    assert [_places(batch)["a"] for batch in batches] == [(0, 8), (8, 8), (16, 4)]


def test_nobody_hits_a_block_of_a_step_that_is_under_way() -> None:
    harness = Harness()
    harness.add("a", 10)
    first = harness.schedule(is_ahead=False)
    harness.add("b", 10)
    second = harness.schedule()
    assert _places(second) == {"a": (10, 1)}
    harness.collect(first)
    assert _places(harness.schedule()) == {"a": (11, 1), "b": (8, 2)}


def test_a_sequence_is_not_run_beyond_its_last_token() -> None:
    harness = Harness()
    harness.add("a", 6, max_tokens=1)
    harness.add("b", 6, first=50, max_tokens=2)
    harness.schedule(is_ahead=False)
    assert _places(harness.schedule()) == {"b": (6, 1)}
    harness = Harness()
    harness.add("a", 6, max_tokens=1)
    harness.schedule(is_ahead=False)
    assert harness.scheduler.schedule(is_ahead=True) is None


def test_nobody_is_preempted_for_a_step_ahead_but_for_the_one_after_it() -> None:
    harness = Harness(num_blocks=1 + 4, tokens=32)
    for first in (0, 100):
        harness.add(str(first), 7, first=first)
    under_way = harness.schedule(is_ahead=False)
    ahead = harness.schedule()  # the eighth token of each has room
    assert len(ahead.items) == 2
    harness.collect(under_way)
    assert harness.scheduler.schedule(is_ahead=True) is None
    assert harness.scheduler.num_preemptions == 0
    harness.collect(ahead)
    assert len(harness.schedule(is_ahead=False).items) == 1
    assert harness.scheduler.num_preemptions == 1


def test_blocks_that_just_suffice_are_taken_ahead() -> None:
    harness = Harness(num_blocks=1 + 5, tokens=32)
    harness.add("grows", 8)
    harness.add("has room", 6, first=100)
    harness.schedule(is_ahead=False)
    assert harness.blocks.num_free_blocks == 1
    assert len(harness.schedule().items) == 2
    assert harness.blocks.num_free_blocks == 0


def test_one_sequence_that_needs_its_answer_holds_the_step_back() -> None:
    harness = Harness()
    harness.add("a", 6)
    state = harness.add("b", 6, first=50)
    state.counts = TokenCounts(state.token_ids)
    under_way = harness.schedule(is_ahead=False)
    assert harness.scheduler.schedule(is_ahead=True) is None
    harness.collect(under_way)
    assert len(harness.schedule().items) == 2


def test_what_ended_while_its_step_was_under_way_is_left_out() -> None:
    harness = Harness()
    state = harness.add("a", 9)
    under_way = [harness.schedule(is_ahead=False), harness.schedule()]
    state.finish_reason = FinishReason.CANCELLED
    harness.scheduler.finish(state)
    assert harness.blocks.num_free_blocks == 64
    for batch in under_way:
        harness.collect(batch)
    assert not harness.scheduler.has_work
    assert harness.blocks.metrics(1).registered_blocks == 0


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
    """Whether each step that was asked for while one was under way was scheduled ahead."""
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
