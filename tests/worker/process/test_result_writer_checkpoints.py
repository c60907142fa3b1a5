from __future__ import annotations

from collections.abc import Sequence

import pytest
import redis

from tests.support.registry import TestRegistry, must_claim, ok
from tests.support.running_thread import running_thread
from tests.support.wait_until import wait_until
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptCheckpoint, UnitLeases
from worker.registry.lifecycle import StopReason
from worker.runtime.held_units import HeldUnit
from worker.runtime.writer import ResultWriter, refused_record


def _hold(registry: TestRegistry, leases: UnitLeases, count: int) -> HeldUnit:
    return HeldUnit(must_claim(leases, UnitRef.shard(registry.running_job(range(count)), 0)), message_id="m")


def _writer(leases: UnitLeases, batch_size: int = 10) -> ResultWriter:
    return ResultWriter(leases, batch_size=batch_size, replace_refused=refused_record)


def _kept(leases: UnitLeases, held: HeldUnit, count: int) -> list[bytes | None]:
    return [kept for _, kept in leases.lines_and_checkpoints(held.claim.ref.job_id, range(count))]


def test_the_newest_checkpoint_of_each_prompt_is_written_in_one_call(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = registry.leases()
    held, checkpoint, calls = _hold(registry, leases, 2), leases.checkpoint, []

    def watched(claim: Claim, checkpoints: Sequence[PromptCheckpoint]) -> bool:
        calls.append([(item.index, item.checkpoint) for item in checkpoints])
        return checkpoint(claim, checkpoints)

    monkeypatch.setattr(leases, "checkpoint", watched)
    writer = _writer(leases)
    for index, text in [(0, "a"), (1, "b"), (0, "c")]:
        assert writer.offer(held, PromptCheckpoint(index, text))
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=5)
    assert calls == [[(0, "c"), (1, "b")]]
    assert _kept(leases, held, 2) == [b"c", b"b"]


@pytest.mark.parametrize("is_record_first", [True, False])
def test_a_record_wins_over_a_checkpoint_of_its_prompt(registry: TestRegistry, is_record_first: bool) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 2), _writer(leases)
    checkpoint = PromptCheckpoint(0, "a")
    if is_record_first:
        assert writer.put(held, [ok(0)])
    assert writer.offer(held, checkpoint)
    if not is_record_first:
        assert writer.put(held, [ok(0)])
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=5)
    assert _kept(leases, held, 2) == [None, None]
    assert held.stop_reason is None


def test_a_tenth_of_the_queue_drops_a_checkpoint_and_holds_nobody_up(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases, 10)  # not started: a hundred items would fill it
    kept = [writer.offer(held, PromptCheckpoint(0, str(number))) for number in range(12)]
    assert kept == [True] * 10 + [False] * 2
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=5)
    assert _kept(leases, held, 1) == [b"9"]


def test_a_checkpoint_that_redis_does_not_take_is_dropped_and_records_go_on(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases)

    def failing(_claim: Claim, _checkpoints: Sequence[PromptCheckpoint]) -> bool:
        raise redis.exceptions.OutOfMemoryError("full")

    monkeypatch.setattr(leases, "checkpoint", failing)
    writer.offer(held, PromptCheckpoint(0, "a"))
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=5)
        writer.put(held, [ok(0)])
        wait_until(lambda: held.is_written)


def test_a_lost_unit_is_heard_of_from_its_checkpoint(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases)
    leases.release(held.claim, count_attempt=False)
    with running_thread(writer.run):
        writer.offer(held, PromptCheckpoint(0, "a"))
        wait_until(lambda: held.stop_reason is StopReason.FENCED)


def test_the_last_records_of_a_unit_and_a_late_checkpoint_do_not_look_like_a_loss(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, writer = _hold(registry, leases, 1), _writer(leases)
    writer.offer(held, PromptCheckpoint(0, "a"))
    writer.put(held, [ok(0)])
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=5)
    assert held.is_written
    assert held.stop_reason is None
