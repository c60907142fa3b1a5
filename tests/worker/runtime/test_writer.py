"""The thread that writes results to the registry."""

from __future__ import annotations

import json
import threading
from collections.abc import Iterator, Sequence

import pytest
import redis

from tests.support.processes import is_waiting, running_thread, wait_until
from tests.support.redis_servers import configured
from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptRecord, PromptResumeState, UnitLeases
from worker.registry.lifecycle import PutStatus, RunMode, StopReason
from worker.runtime.held_units import HeldUnit
from worker.runtime.writer import MAX_BATCH_BYTES, ResultWriter, refused_record


def _hold(registry: TestRegistry, leases: UnitLeases, count: int) -> HeldUnit:
    return HeldUnit(must_claim(leases, UnitRef.shard(registry.running_job(range(count)), 0)), message_id="m")


def _writer(leases: UnitLeases, batch_size: int) -> ResultWriter:
    return ResultWriter(leases, batch_size=batch_size, replace_refused=refused_record)


def test_records_are_written_in_batches_and_the_owner_hears_of_the_end(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 45)
    writer = _writer(leases, 10)
    with running_thread(writer.run):
        for index in range(45):
            writer.put(held, [ok(index)])
        wait_until(lambda: held.is_written)
    assert registry.status(held.claim.ref.job_id).request_counts.completed == 45


def test_records_that_came_together_are_still_written_in_bounded_batches(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 25)
    put, sizes = leases.put, list[int]()

    def counting_put(claim: Claim, records: Sequence[PromptRecord], *, at_end: bool) -> tuple[PutStatus, RunMode]:
        sizes.append(len(records))
        return put(claim, records, at_end=at_end)

    monkeypatch.setattr(leases, "put", counting_put)
    writer = _writer(leases, 10)
    writer.put(held, (ok(index) for index in range(25)))
    with running_thread(writer.run):
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert sizes == [10, 10, 5]
    assert held.is_written


def test_a_queue_is_full_of_records_however_they_came(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 12)
    writer = _writer(leases, 1)  # not started: ten records fill it
    writer.put(held, (ok(index) for index in range(10)))
    blocked = threading.Thread(target=writer.put, args=(held, [ok(10), ok(11)]))
    blocked.start()
    wait_until(lambda: is_waiting(blocked))
    with running_thread(writer.run):
        blocked.join(20)
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert held.is_written


def test_a_queue_is_full_of_bytes_too_but_takes_a_record_of_any_size(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.writer.MAX_QUEUED_BYTES", 1000)
    leases = registry.leases()
    held = _hold(registry, leases, 3)
    writer = _writer(leases, 100)
    assert writer.put(held, [ok(0, "x" * 999)])
    assert writer.put(held, [ok(1, "x" * 2000)])  # one byte is left: the next one waits
    blocked = threading.Thread(target=writer.put, args=(held, [ok(2)]))
    blocked.start()
    wait_until(lambda: is_waiting(blocked))
    assert not writer.offer(held, PromptResumeState(2, "{}"))
    with running_thread(writer.run):
        blocked.join(20)
        assert held.wait_flushed(until=StopReason.FENCED, timeout_s=20)
    assert held.is_written


def test_no_more_records_are_made_than_the_queue_takes(registry: TestRegistry) -> None:
    leases = registry.leases()
    held, made = _hold(registry, leases, 30), list[int]()
    writer = _writer(leases, 1)  # not started: ten records fill it

    def records() -> Iterator[PromptRecord]:
        for index in range(30):
            made.append(index)
            yield ok(index)

    blocked = threading.Thread(target=writer.put, args=(held, records()))
    blocked.start()
    wait_until(lambda: is_waiting(blocked))
    assert 10 <= len(made) <= 12  # one waits, the next did not fit beside it
    with running_thread(writer.run):
        blocked.join(20)
        wait_until(lambda: held.is_written)


def test_what_is_queued_is_written_before_the_writer_stops(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 20)
    writer = _writer(leases, 3)
    for index in range(20):
        writer.put(held, [ok(index)])
    with running_thread(writer.run) as thread:
        assert thread.stop(30)
    assert held.is_written


def test_a_redis_that_comes_back_gets_every_record(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 5)
    put, failures = leases.put, [redis.ConnectionError("away"), redis.exceptions.OutOfMemoryError("full")]

    def failing_put(claim: Claim, records: Sequence[PromptRecord], *, at_end: bool) -> tuple[PutStatus, RunMode]:
        if failures:
            raise failures.pop()
        return put(claim, records, at_end=at_end)

    monkeypatch.setattr(leases, "put", failing_put)
    monkeypatch.setattr("worker.runtime.writer.RETRY_S", 0.01)
    writer = _writer(leases, 5)
    with running_thread(writer.run):
        for index in range(5):
            writer.put(held, [ok(index)])
        wait_until(lambda: held.is_written)


def test_a_full_queue_holds_the_shard_back_until_it_has_to_stop(registry: TestRegistry) -> None:
    leases = registry.leases()
    held = _hold(registry, leases, 1)
    writer = _writer(leases, 1)  # not started: ten records fill it
    for index in range(10):
        writer.put(held, [ok(index)])
    blocked = threading.Thread(target=writer.put, args=(held, [ok(10)]))
    blocked.start()
    wait_until(lambda: is_waiting(blocked))
    held.stop(StopReason.RELEASED)
    blocked.join(20)
    assert not blocked.is_alive()


def test_a_cancelled_or_lost_unit_is_heard_of_from_the_write(registry: TestRegistry) -> None:
    leases = registry.leases()
    cancelled, lost = _hold(registry, leases, 3), _hold(registry, leases, 3)
    registry.control.cancel(cancelled.claim.ref.job_id)
    leases.release(lost.claim, count_attempt=False)
    writer = _writer(leases, 5)
    with running_thread(writer.run):
        writer.put(cancelled, [ok(0)])
        writer.put(lost, [ok(0)])
        wait_until(lambda: cancelled.stop_reason is StopReason.CANCELLED and lost.stop_reason is StopReason.FENCED)


def test_a_full_redis_gets_every_record_when_it_has_room(
    registry: TestRegistry, redis_url: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("worker.runtime.writer.RETRY_S", 0.01)
    leases = registry.leases()
    kept, cancelled = _hold(registry, leases, 3), _hold(registry, leases, 2)
    writer = _writer(leases, 10)
    with running_thread(writer.run):
        with configured(redis_url, maxmemory="1"):
            writer.put(kept, [ok(index) for index in range(3)])
            wait_until(lambda: caplog.text.count("could not write 3 records") >= 2)
            assert [status for status, *_ in leases.renew([kept.claim])] == [PutStatus.OPEN]
        wait_until(lambda: kept.is_written)
        with configured(redis_url, maxmemory="1"):
            cancelled.stop(StopReason.CANCELLED)
            writer.put(cancelled, [ok(0), ok(1)])  # of a job that is to end: afterwards it can be deleted
            wait_until(lambda: cancelled.is_written)
    assert registry.status(kept.claim.ref.job_id).request_counts.completed == 3


def test_a_write_is_bounded_by_bytes(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases()
    held, put, sizes = _hold(registry, leases, 7), leases.put, []

    def watched_put(claim: Claim, records: Sequence[PromptRecord], *, at_end: bool) -> tuple[PutStatus, RunMode]:
        sizes.append(sum(len(record.record) for record in records))
        return put(claim, records, at_end=at_end)

    monkeypatch.setattr(leases, "put", watched_put)
    writer = _writer(leases, 10)
    for index in range(7):
        writer.put(held, [ok(index, "x" * (1_500_000 if index < 6 else 5_000_000))])
    with running_thread(writer.run):
        wait_until(lambda: held.is_written)
    assert sum(sizes) == 14_000_000
    assert sorted(sizes)[-1] == 5_000_000  # alone
    assert all(size <= MAX_BATCH_BYTES for size in sorted(sizes)[:-1])
    assert len(sizes) < 7


def _codes(registry: TestRegistry, held: HeldUnit) -> list[str]:
    """For each record, in order: "ok" or the code of its error."""
    records = [json.loads(record) for record in registry.records(held.claim.ref.job_id)]
    return [record["response"]["body"]["error"]["code"] if "response" in record else "ok" for record in records]


def test_a_record_that_redis_refuses_becomes_an_error_and_others_go_on(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    leases = registry.leases()
    held, put = _hold(registry, leases, 3), leases.put

    def refusing_put(claim: Claim, records: Sequence[PromptRecord], *, at_end: bool) -> tuple[PutStatus, RunMode]:
        if any("poison" in record.record for record in records):
            raise redis.ResponseError("ERR what is this")
        return put(claim, records, at_end=at_end)

    monkeypatch.setattr(leases, "put", refusing_put)
    writer = _writer(leases, 10)
    for index, record in enumerate(["{}", '{"custom_id": "mine", "text": "poison"}', "{}"]):
        writer.put(held, [ok(index, record)])
    with running_thread(writer.run):
        wait_until(lambda: held.is_written)
    assert _codes(registry, held) == ["ok", "result_refused", "ok"]
    assert json.loads(registry.records(held.claim.ref.job_id)[1])["custom_id"] == "mine"
    job = registry.status(held.claim.ref.job_id)
    assert (job.request_counts.completed, job.request_counts.failed, job.usage.output_tokens) == (2, 1, 9)


@pytest.mark.usefixtures("short_pauses")
def test_a_record_too_large_for_redis_becomes_an_error(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.writer.OVERSIZE_TRIES", 1)  # each has the client's own retries
    leases = registry.leases()
    held, writer = _hold(registry, leases, 2), _writer(leases, 10)
    registry.redis.config_set("proto-max-bulk-len", 1024 * 1024)
    try:
        writer.put(held, [ok(0, '{"text": "' + "x" * (MAX_BATCH_BYTES + 1) + '"}')])
        writer.put(held, [ok(1)])
        with running_thread(writer.run):
            wait_until(lambda: held.is_written, timeout_s=20)
    finally:
        registry.redis.config_set("proto-max-bulk-len", 512 * 1024 * 1024)
    assert _codes(registry, held) == ["result_refused", "ok"]


def test_a_unit_of_which_redis_takes_no_record_does_not_hold_up_the_others(registry: TestRegistry) -> None:
    leases = registry.leases()
    broken, healthy, writer = _hold(registry, leases, 2), _hold(registry, leases, 2), _writer(leases, 10)
    registry.redis.set(registry.keys.records(broken.claim.ref.job_id), "no hash")
    for index in range(2):
        writer.put(broken, [ok(index)])
        writer.put(healthy, [ok(index)])
    with running_thread(writer.run):
        wait_until(lambda: healthy.is_written and broken.stop_reason is StopReason.FENCED)
