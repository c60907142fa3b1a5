"""What a shard's prompts had generated when their worker stopped is not generated again."""

from __future__ import annotations

import json
import threading

import pytest

from tests.support.fake_engine import answer
from tests.support.registry import TestRegistry, must_claim
from tests.support.units import Units, running_units
from tests.support.wait_until import wait_until
from tests.support.writing_engine import WritingEngine
from worker.registry.keys import UnitRef
from worker.registry.leases import PromptCheckpoint
from worker.registry.lifecycle import StopReason
from worker.runtime.held_units import HeldUnit
from worker.runtime.shard import decode_checkpoint

PROMPTS = ["a", "b", "c"]
ANSWER_TOKENS = 16  # of fake_engine.answer


def _hold_job(units: Units) -> HeldUnit:
    job_id = units.registry.submit([json.dumps({"prompt": prompt}).encode() for prompt in PROMPTS])
    plan = must_claim(units.leases, UnitRef.plan(job_id))
    assert units.leases.planned(plan, [range(len(PROMPTS))], ageing_s=60.0)
    return units.hold(UnitRef.shard(job_id, 0))


def _kept(units: Units, held: HeldUnit) -> list[int]:
    """Tokens in the checkpoint of each prompt."""
    found = units.leases.lines_and_checkpoints(held.claim.ref.job_id, range(len(PROMPTS)))
    return [0 if raw is None else decode_checkpoint(raw).num_tokens for _, raw in found]


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
    thread.join(5)
    assert not thread.is_alive()
    assert held.wait_flushed(until=StopReason.FENCED, timeout_s=5)


def _finish(registry: TestRegistry, ref: UnitRef) -> WritingEngine:
    engine = WritingEngine()
    with running_units(registry, engine) as units:
        units.shard_run(units.hold(ref)).run()
    assert _texts(registry, ref.job_id) == sorted(answer(prompt) for prompt in PROMPTS)
    assert not registry.redis.exists(registry.keys.checkpoints(ref.job_id))
    usage = registry.status(ref.job_id).usage
    assert (usage.resumed_tokens, usage.output_tokens) == (sum(engine.resumed), ANSWER_TOKENS * len(PROMPTS))
    return engine


def test_checkpoints_that_come_due_are_kept_while_the_shard_runs_and_gone_at_its_end(registry: TestRegistry) -> None:
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=9)) as units:
        held = _hold_job(units)
        thread = threading.Thread(target=units.shard_run(held).run)
        thread.start()
        wait_until(lambda: _kept(units, held) == [8, 8, 8])
        held.stop(StopReason.ENGINE_FAILED)
        thread.join(5)
        units.leases.release(held.claim, count_attempt=False)
    engine = _finish(registry, held.claim.ref)
    assert engine.resumed == [8, 8, 8]
    assert engine.num_generated == (ANSWER_TOKENS - 8) * len(PROMPTS)


def test_a_shard_that_is_given_back_keeps_every_token(registry: TestRegistry) -> None:
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=7)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 7, StopReason.RELEASED)
        assert _kept(units, held) == [7, 7, 7]
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
    return registry.redis.exists(registry.keys.checkpoints(held.claim.ref.job_id))


def test_who_lost_the_unit_writes_no_checkpoint(registry: TestRegistry) -> None:
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=3)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 3, StopReason.FENCED)
        assert _kept(units, held) == [0, 0, 0]


def test_a_step_that_does_not_end_is_not_waited_for(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.shard.SUSPEND_TIMEOUT_S", 0.05)
    with running_units(registry, WritingEngine(step_s=0.5, stop_after=3)) as units:
        held = _hold_job(units)
        thread = threading.Thread(target=units.shard_run(held).run)
        thread.start()
        wait_until(lambda: not units.engine_thread.is_idle)
        held.stop(StopReason.RELEASED)
        thread.join(0.4)
        assert not thread.is_alive()
        assert _kept(units, held) == [0, 0, 0]


def test_a_checkpoint_that_cannot_be_read_means_the_prompt_starts_over(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    with running_units(registry) as units:
        held = _hold_job(units)
        assert units.leases.checkpoint(held.claim, [PromptCheckpoint(1, '{"identity": 1}')])
        units.leases.release(held.claim, count_attempt=False)
    assert _finish(registry, held.claim.ref).resumed == [0, 0, 0]
    [dropped] = [record for record in caplog.records if "checkpoint of a prompt" in record.message]
    assert dropped.__dict__["index"] == 1


def test_a_checkpoint_that_is_too_large_is_not_written(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.shard.MAX_CHECKPOINT_BYTES", 72)  # 4 tokens fit, 8 do not
    with running_units(registry, WritingEngine(step_s=0.001, stop_after=9)) as units:
        held = _hold_job(units)
        _stop_in_the_middle(units, held, 9, StopReason.RELEASED)
        assert _kept(units, held) == [4, 4, 4]
