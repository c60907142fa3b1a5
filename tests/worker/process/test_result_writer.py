from __future__ import annotations

import threading
from collections.abc import Sequence

import pytest
import redis

from tests.support.registry import TestRegistry, must_claim, ok
from tests.support.wait_until import wait_until
from worker.process.held_unit import HeldUnit
from worker.process.result_writer import ResultWriter
from worker.registry.claim import Claim
from worker.registry.finished_prompt import FinishedPrompt
from worker.registry.put_status import PutStatus
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason
from worker.registry.unit_leases import UnitLeases
from worker.registry.unit_ref import UnitRef


def _hold(registry: TestRegistry, leases: UnitLeases, count: int) -> HeldUnit:
    return HeldUnit(must_claim(leases, UnitRef.shard(registry.running_job(range(count)), 0)), message_id="m")


def test_records_are_written_in_batches_and_the_owner_hears_of_the_end(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 45)
    writer = ResultWriter(leases, batch_size=10)
    writer.start()
    for index in range(45):
        writer.put(held, ok(index))
    wait_until(lambda: held.is_written)
    assert writer.stop(5)
    assert registry.reader.status(held.claim.ref.job_id).request_counts.completed == 45


def test_what_is_queued_is_written_before_the_writer_stops(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 20)
    writer = ResultWriter(leases, batch_size=3)
    for index in range(20):
        writer.put(held, ok(index))
    writer.start()
    assert writer.stop(5)
    assert held.is_written


def test_a_redis_that_comes_back_gets_every_record(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 5)
    put, failures = leases.put, [redis.ConnectionError("away"), redis.exceptions.OutOfMemoryError("full")]

    def failing_put(claim: Claim, records: Sequence[FinishedPrompt]) -> tuple[PutStatus, RunMode]:
        if failures:
            raise failures.pop()
        return put(claim, records)

    monkeypatch.setattr(leases, "put", failing_put)
    monkeypatch.setattr("worker.process.result_writer.RETRY_S", 0.01)
    writer = ResultWriter(leases, batch_size=5)
    writer.start()
    for index in range(5):
        writer.put(held, ok(index))
    wait_until(lambda: held.is_written)
    assert writer.stop(5)


def test_a_full_queue_holds_the_shard_back_until_it_has_to_stop(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 1)
    writer = ResultWriter(leases, batch_size=1)  # not started: ten records fill it
    for index in range(10):
        writer.put(held, ok(index))
    blocked = threading.Thread(target=writer.put, args=(held, ok(10)))
    blocked.start()
    blocked.join(0.3)
    assert blocked.is_alive()
    held.stop(StopReason.RELEASED)
    blocked.join(5)
    assert not blocked.is_alive()


def test_a_cancelled_or_lost_unit_is_heard_of_from_the_write(registry: TestRegistry) -> None:
    leases = registry.leases()
    cancelled, lost = _hold(registry, leases, 3), _hold(registry, leases, 3)
    registry.control.cancel(cancelled.claim.ref.job_id)
    leases.release(lost.claim, count_attempt=False)
    writer = ResultWriter(leases, batch_size=5)
    writer.start()
    writer.put(cancelled, ok(0))
    writer.put(lost, ok(0))
    wait_until(lambda: cancelled.stop_reason is StopReason.CANCELLED and lost.stop_reason is StopReason.FENCED)
    assert writer.stop(5)
