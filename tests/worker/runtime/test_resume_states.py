"""How far prompts had come is written, read back, and not generated again."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Sequence
from typing import Any

import pytest
import redis
from hypothesis import given
from hypothesis import strategies as st

from engine.request import ResumeState, SequenceResumeState, TokenLogprobs
from tests.support.fake_engine import GatedEngine, WritingEngine, answer
from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry, Units, must_claim, ok, running_units
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, NewShard, PromptResumeState, UnitLeases
from worker.registry.lifecycle import PutStatus, StopReason
from worker.runtime.held_units import HeldUnit
from worker.runtime.resume_state import decode_resume_state, encode_resume_state
from worker.runtime.writer import ResultWriter, refused_record

PROMPTS = ["a", "b", "c"]
ANSWER_TOKENS = 16  # of fake_engine.answer

token_ids = st.integers(min_value=0, max_value=2**31)
logprobs = st.floats(max_value=0.0, allow_nan=False)
token_logprobs = st.builds(
    TokenLogprobs, token_ids, logprobs, st.lists(st.tuples(token_ids, logprobs), max_size=3).map(tuple)
)
sequences = st.builds(
    SequenceResumeState,
    st.lists(token_ids, max_size=20).map(tuple),
    st.none() | st.lists(token_logprobs, max_size=5).map(tuple),
)
resume_states = st.builds(
    ResumeState,
    st.text("0123456789abcdef"),
    st.integers(min_value=-(2**63), max_value=2**63 - 1),
    st.lists(sequences, max_size=3).map(tuple),
)


def _hold(registry: TestRegistry, leases: UnitLeases, count: int) -> HeldUnit:
    return HeldUnit(must_claim(leases, UnitRef.shard(registry.running_job(range(count)), 0)), message_id="m")


def _writer(leases: UnitLeases, batch_size: int = 10) -> ResultWriter:
    return ResultWriter(leases, batch_size=batch_size, replace_refused=refused_record)


def _kept_bytes(leases: UnitLeases, held: HeldUnit, count: int) -> list[bytes | None]:
    return [kept for _, kept in leases.lines_and_resume_states(held.claim.ref.job_id, range(count))]


def test_the_newest_resume_state_of_each_prompt_is_written_in_one_call(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = registry.leases()
    held, put_resume_states, calls = _hold(registry, leases, 2), leases.put_resume_states, []

    def watched(claim: Claim, resume_states: Sequence[PromptResumeState]) -> bool:
        calls.append([(item.index, item.state) for item in resume_states])
        return put_resume_states(claim, resume_states)

    monkeypatch.setattr(leases, "put_resume_states", watched)
    writer = _writer(leases)
    for index, text in [(0, "a"), (1, "b"), (0, "c")]:
        assert writer.offer(held, PromptResumeState(index, text))
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert calls == [[(0, "c"), (1, "b")]]
    assert _kept_bytes(leases, held, 2) == [b"c", b"b"]


@pytest.mark.parametrize("is_record_first", [True, False])
def test_a_record_wins_over_a_resume_state_of_its_prompt(registry: TestRegistry, is_record_first: bool) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 2), _writer(leases)
    resume_state = PromptResumeState(0, "a")
    if is_record_first:
        assert writer.put(held, [ok(0)])
    assert writer.offer(held, resume_state)
    if not is_record_first:
        assert writer.put(held, [ok(0)])
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert _kept_bytes(leases, held, 2) == [None, None]
    assert held.stop_reason is None


def test_a_tenth_of_the_queue_drops_a_resume_state_and_holds_nobody_up(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases, 10)  # not started: a hundred items would fill it
    kept = [writer.offer(held, PromptResumeState(0, str(number))) for number in range(12)]
    assert kept == [True] * 10 + [False] * 2
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert _kept_bytes(leases, held, 1) == [b"9"]


def test_a_resume_state_that_redis_does_not_take_is_dropped(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases)

    def failing(_claim: Claim, _resume_states: Sequence[PromptResumeState]) -> bool:
        raise redis.exceptions.OutOfMemoryError("full")

    monkeypatch.setattr(leases, "put_resume_states", failing)
    writer.offer(held, PromptResumeState(0, "a"))
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
        writer.put(held, [ok(0)])
        wait_until(lambda: held.is_written)


def test_a_lost_unit_is_heard_of_from_its_resume_state(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases)
    leases.release(held.claim, count_attempt=False)
    with running_thread(writer.run):
        writer.offer(held, PromptResumeState(0, "a"))
        wait_until(lambda: held.stop_reason is StopReason.FENCED)


def test_a_resume_state_behind_the_last_records_does_not_look_like_a_loss(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases)
    writer.offer(held, PromptResumeState(0, "a"))
    writer.put(held, [ok(0)])
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert held.is_written
    assert held.stop_reason is None


def _hold_job(units: Units) -> HeldUnit:
    job_id = units.registry.submit([json.dumps({"prompt": prompt}).encode() for prompt in PROMPTS])
    plan = must_claim(units.leases, UnitRef.plan(job_id))
    assert units.leases.planned(plan, [NewShard(range(len(PROMPTS)))], ageing_s=60.0) is PutStatus.UNIT_DONE
    return units.hold(UnitRef.shard(job_id, 0))


def _kept_tokens(units: Units, held: HeldUnit) -> list[int]:
    """Tokens in the resume state of each prompt."""
    found = units.leases.lines_and_resume_states(held.claim.ref.job_id, range(len(PROMPTS)))
    return [0 if raw is None else decode_resume_state(raw).num_tokens for _, raw in found]


def _texts(registry: TestRegistry, job_id: str) -> list[str]:
    records = [json.loads(record) for record in registry.records(job_id)]
    return sorted(record["response"]["body"]["choices"][0]["text"] for record in records)


def _stop_in_the_middle(units: Units, held: HeldUnit, tokens: int, reason: StopReason) -> None:
    thread = threading.Thread(target=units.shard_run(held).run)
    thread.start()
    engine = units.engine
    assert isinstance(engine, WritingEngine)
    wait_until(lambda: engine.num_generated == tokens * len(PROMPTS))
    held.stop(reason)
    thread.join(20)
    assert not thread.is_alive()
    assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)


def _finish(registry: TestRegistry, ref: UnitRef) -> WritingEngine:
    engine = WritingEngine()
    with running_units(registry, engine) as units:
        units.shard_run(units.hold(ref)).run()
    assert _texts(registry, ref.job_id) == sorted(answer(prompt) for prompt in PROMPTS)
    assert not registry.redis.exists(registry.keys.resume_states(ref.job_id))
    usage = registry.status(ref.job_id).usage
    assert (usage.resumed_tokens, usage.output_tokens) == (sum(engine.resumed), ANSWER_TOKENS * len(PROMPTS))
    return engine


def test_due_resume_states_are_kept_until_the_shard_ends(registry: TestRegistry) -> None:
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=9)) as units:
        held = _hold_job(units)
        thread = threading.Thread(target=units.shard_run(held).run)
        thread.start()
        wait_until(lambda: _kept_tokens(units, held) == [8, 8, 8])
        held.stop(StopReason.ENGINE_FAILED)
        thread.join(20)
        units.leases.release(held.claim, count_attempt=False)
    engine = _finish(registry, held.claim.ref)
    assert engine.resumed == [8, 8, 8]
    assert engine.num_generated == (ANSWER_TOKENS - 8) * len(PROMPTS)


def test_a_shard_that_is_given_back_keeps_every_token(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.shard.SUSPEND_TIMEOUT_S", 60.0)
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=7)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 7, StopReason.RELEASED)
        assert _kept_tokens(units, held) == [7, 7, 7]
        wait_until(lambda: units.engine_thread.is_idle)
        assert units.engine.num_aborted == len(PROMPTS)
        units.leases.release(held.claim, count_attempt=False)
    engine = _finish(registry, held.claim.ref)
    assert engine.num_generated == (ANSWER_TOKENS - 7) * len(PROMPTS)


@pytest.mark.parametrize("reason", [StopReason.CANCELLED, StopReason.EXPIRED])
def test_a_shard_that_ends_for_good_keeps_nothing(registry: TestRegistry, reason: StopReason) -> None:
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=9)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 9, reason)
        assert _kept_key(registry, held) == 0
    assert registry.status(held.claim.ref.job_id).status.is_terminal


def _kept_key(registry: TestRegistry, held: HeldUnit) -> object:
    return registry.redis.exists(registry.keys.resume_states(held.claim.ref.job_id))


def test_who_lost_the_unit_writes_no_resume_state(registry: TestRegistry) -> None:
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=3)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 3, StopReason.FENCED)
        assert _kept_tokens(units, held) == [0, 0, 0]


def test_a_step_that_does_not_end_is_not_waited_for(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.shard.SUSPEND_TIMEOUT_S", 0.05)
    engine = GatedEngine()
    with running_units(registry, engine) as units:
        held = _hold_job(units)
        thread = threading.Thread(target=units.shard_run(held).run)
        thread.start()
        wait_until(lambda: engine.most_open == len(PROMPTS))
        held.stop(StopReason.RELEASED)
        thread.join(20)
        assert not thread.is_alive()
        assert _kept_tokens(units, held) == [0, 0, 0]
        engine.goes_on.set()


def test_a_resume_state_that_cannot_be_read_means_the_prompt_starts_over(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with running_units(registry) as units:
        held = _hold_job(units)
        assert units.leases.put_resume_states(held.claim, [PromptResumeState(1, '{"identity": 1}')])
        units.leases.release(held.claim, count_attempt=False)
    assert _finish(registry, held.claim.ref).resumed == [0, 0, 0]
    [dropped] = [record for record in caplog.records if "resume state of a prompt" in record.message]
    assert dropped.__dict__["index"] == 1


def test_a_resume_state_that_is_too_large_is_not_written(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.shard.MAX_RESUME_STATE_BYTES", 72)  # 4 tokens fit, 8 do not
    monkeypatch.setattr("worker.runtime.shard.SUSPEND_TIMEOUT_S", 60.0)
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=9)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 9, StopReason.RELEASED)
        assert _kept_tokens(units, held) == [4, 4, 4]


@given(resume_states)
def test_what_is_read_is_what_was_written_to_the_bit(resume_state: ResumeState) -> None:
    assert decode_resume_state(encode_resume_state(resume_state).encode("ascii")) == resume_state


def test_a_forbidden_token_has_a_logprob_of_minus_infinity() -> None:
    logprobs = (TokenLogprobs(1, -math.inf, ()),)
    resume_state = ResumeState("a", 1, (SequenceResumeState((1,), logprobs),))
    assert decode_resume_state(encode_resume_state(resume_state).encode()) == resume_state


@pytest.mark.parametrize(
    "value",
    [
        None, [], 3, {}, {"identity": 1, "seed": "1", "sequences": []}, {"identity": "a", "seed": 1, "sequences": []},
        {"identity": "a", "seed": "x", "sequences": []}, {"identity": "a", "seed": "1", "sequences": 3},
        {"identity": "a", "seed": "1", "sequences": [[1]]},
        {"identity": "a", "seed": "1", "sequences": [[[1.5], None]]},
        {"identity": "a", "seed": "1", "sequences": [[[True], None]]},
        {"identity": "a", "seed": "1", "sequences": [[[1], [[1, float("nan"), []]]]]},
        {"identity": "a", "seed": "1", "sequences": [[[1], [[1, -0.5]]]]},
    ],
)  # fmt: skip
def test_what_is_no_resume_state_is_a_value_error(value: Any) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_resume_state(json.dumps(value).encode())


@pytest.mark.parametrize("raw", [b"", b"{", b"\xff\xfe\x00", b"[" * 100_000, b'{"identity": "a"'])
def test_bytes_that_are_no_json_are_a_value_error(raw: bytes) -> None:
    with pytest.raises(ValueError, match=r"."):
        decode_resume_state(raw)
