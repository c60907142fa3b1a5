"""Leases of running units are kept, and those of dead workers are reaped."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import redis

from engine.request import Request
from engine.sampling_params import SamplingParams
from settings import WorkerSettings
from tests.support.fake_engine import FakeEngine, GatedEngine, fed
from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry, Units, must_claim, running_units
from worker.broker.messages import MessageEnd
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, PutStatus, RunMode, StopReason
from worker.registry.models import Heartbeats
from worker.registry.queues import DueUnit, ReapQueue
from worker.runtime.held_units import HeldUnit, HeldUnits
from worker.runtime.lease_keeper import WATCH_INTERVAL_S, LeaseKeeper, Reaper
from worker.runtime.unit_runner import OFFER_LOOKS, PATIENCE_S
from worker.schemas import JobState, SubmitOptions, WorkerInfo

INFO = WorkerInfo(id="w1", version="1", model="m", steps=3, open_requests=2, held=1)
LEASE_S = 30.0


@contextmanager
def _keeping(units: Units, *, hang_timeout_s: float = 60, renew_interval_s: float = 0.1) -> Iterator[LeaseKeeper]:
    keeper = LeaseKeeper(
        units.leases,
        Heartbeats(units.registry.directory(), units.registry.keys),
        units.held_units,
        units.engine_thread,
        settings=WorkerSettings(lease_s=3000, renew_interval_s=renew_interval_s, hang_timeout_s=hang_timeout_s),
        describe=lambda: INFO,
    )
    with running_thread(keeper.run):
        yield keeper


def _outlast_a_lease(units: Units, ref: UnitRef) -> None:
    """Let more time pass than the unit's lease lasts, by Redis's clock, half of it before each renewal."""
    for _ in range(3):
        units.registry.let_pass(ref, LEASE_S / 2)
        wait_until(lambda: units.registry.lease_left_s(ref) > LEASE_S / 2)


def _running_request(units: Units) -> AbstractContextManager[object]:
    return fed(units.engine_thread, [Request("r", [65], SamplingParams())])


def test_leases_are_kept_while_the_engine_is_idle(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry, lease_s=LEASE_S) as units, _keeping(units):
        held = units.hold(shard)
        _outlast_a_lease(units, shard)
        assert units.leases.claim(shard) is ClaimRefusal.BUSY
        assert held.stop_reason is None


def test_leases_are_kept_while_the_engine_advances(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    engine = FakeEngine(steps_per_request=1_000_000, step_s=0.02)
    with running_units(registry, engine, lease_s=LEASE_S) as units, _keeping(units), _running_request(units):
        units.hold(shard)
        _outlast_a_lease(units, shard)
        assert units.leases.claim(shard) is ClaimRefusal.BUSY


def test_a_slow_step_keeps_its_leases(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    engine = GatedEngine()
    with running_units(registry, engine, lease_s=LEASE_S) as units, _keeping(units), _running_request(units):
        wait_until(lambda: engine.most_open == 1)
        units.hold(shard)
        _outlast_a_lease(units, shard)
        assert units.leases.claim(shard) is ClaimRefusal.BUSY
        engine.goes_on.set()


def test_an_engine_that_hangs_loses_its_leases(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    engine = GatedEngine()  # one step outlasts every lease
    queue = registry.reap_queue(patience_s=0.4)
    with running_units(registry, engine, lease_s=0.4) as units, _keeping(units, hang_timeout_s=0.5):
        units.hold(shard)
        with _running_request(units):
            wait_until(lambda: shard in [due.ref for due in queue.due()])
            assert units.leases.claim(shard) is ClaimRefusal.SUSPECT
            engine.goes_on.set()


def test_the_owner_of_a_cancelled_job_is_told_within_a_second(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    assert WATCH_INTERVAL_S < 1
    with running_units(registry) as units:
        held = units.hold(UnitRef.shard(job_id, 0))
        with _keeping(units, renew_interval_s=600):  # no renewal tells it
            wait_until(lambda: registry.workers() == [INFO])  # it has looked
            assert held.stop_reason is None
            registry.control.cancel(job_id)
            wait_until(lambda: held.stop_reason is StopReason.CANCELLED)


def test_the_owner_is_told_of_the_deadline(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], options=SubmitOptions(deadline_s=600))
    with running_units(registry) as units:
        held = units.hold(UnitRef.shard(job_id, 0))
        with _keeping(units, renew_interval_s=600):  # no renewal tells it
            wait_until(lambda: registry.workers() == [INFO])  # it has looked
            assert held.stop_reason is None
            held.set_time_left(0.3)
            wait_until(lambda: held.stop_reason is StopReason.EXPIRED)


def test_the_owner_is_told_that_another_has_its_unit(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:
        held = units.hold(shard)
        units.leases.release(held.claim, count_attempt=False)
        with _keeping(units):
            wait_until(lambda: held.stop_reason is StopReason.FENCED)


def test_a_unit_that_ended_while_its_lease_was_renewed_is_done(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    is_concluded = threading.Event()
    put, wait_flushed = UnitLeases.put, HeldUnit.wait_flushed

    def put_and_answer_late(*arguments: Any, **options: Any) -> object:
        answer = put(*arguments, **options)  # the unit's last record: from here on it has no lease
        assert is_concluded.wait(20)
        return answer

    def conclude(held: HeldUnit, *arguments: Any, **options: Any) -> bool:
        is_concluded.set()
        return wait_flushed(held, *arguments, **options)

    monkeypatch.setattr(UnitLeases, "put", put_and_answer_late)
    monkeypatch.setattr(HeldUnit, "wait_flushed", conclude)
    with running_units(registry) as units, _keeping(units), caplog.at_level(logging.INFO):
        runner = units.runner()
        assert runner.run(shard, "m", lambda held: units.shard_run(held).run()) is MessageEnd.DONE

    assert "shard done" in caplog.messages
    assert not [event for event in caplog.records if event.levelno >= logging.WARNING]


@pytest.mark.parametrize(("ended_by", "outcome"), [("put", "cancelled"), ("release", "given back")])
def test_a_lease_its_owner_ended_during_renewal_is_not_lost(
    registry: TestRegistry,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
    ended_by: str,
    outcome: str,
) -> None:
    job_id = registry.running_job([0, 1])
    is_refused = threading.Event()
    end, stop = getattr(UnitLeases, ended_by), HeldUnit.stop

    def end_and_answer_late(*arguments: Any, **options: Any) -> object:
        answer = end(*arguments, **options)
        assert is_refused.wait(20)  # until a renewal has found no lease
        return answer

    def note_stop(held: HeldUnit, reason: StopReason) -> None:
        stop(held, reason)
        if reason is StopReason.FENCED:
            is_refused.set()

    monkeypatch.setattr(UnitLeases, ended_by, end_and_answer_late)
    monkeypatch.setattr(HeldUnit, "stop", note_stop)
    with running_units(registry) as units, caplog.at_level(logging.INFO):

        def work(held: HeldUnit) -> None:
            if ended_by == "put":
                registry.control.cancel(job_id)
                held.stop(StopReason.CANCELLED)
                units.shard_run(held).run()
            held.stop(StopReason.RELEASED)

        with _keeping(units):
            units.runner().run(UnitRef.shard(job_id, 0), "m", work)

    assert f"shard {outcome}" in caplog.messages
    assert not [event for event in caplog.records if event.levelno >= logging.WARNING]


def test_the_heartbeat_is_there_while_the_keeper_runs(registry: TestRegistry) -> None:
    with running_units(registry) as units:
        with _keeping(units):
            wait_until(lambda: registry.workers() == [INFO])
            assert 0 < registry.redis.ttl(f"{registry.keys.workers}w1") <= 30
        assert registry.workers() == []


def test_the_heartbeat_is_overdue_while_redis_takes_no_writes(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: object, **__: object) -> None:
        raise redis.ResponseError("OOM command not allowed when used memory > 'maxmemory'.")

    with running_units(registry) as units, _keeping(units) as keeper:
        wait_until(lambda: registry.workers() == [INFO])
        wait_until(lambda: keeper.overdue_s == 0)
        with monkeypatch.context() as full:
            full.setattr(Heartbeats, "beat", refuse)
            wait_until(lambda: keeper.overdue_s >= 1)
        wait_until(lambda: keeper.overdue_s == 0)


@pytest.mark.parametrize(
    ("status", "mode", "reason", "is_written"),
    [
        (PutStatus.OPEN, RunMode.RUN, None, False),
        (PutStatus.OPEN, RunMode.CANCELLED, StopReason.CANCELLED, False),
        (PutStatus.OPEN, RunMode.EXPIRED, StopReason.EXPIRED, False),
        (PutStatus.FENCED, RunMode.CANCELLED, StopReason.FENCED, False),
        (PutStatus.UNIT_DONE, RunMode.CANCELLED, None, True),
        (PutStatus.JOB_DONE, RunMode.RUN, None, True),
    ],
)
def test_a_writes_answer_says_whether_to_go_on(
    registry: TestRegistry, status: PutStatus, mode: RunMode, reason: StopReason | None, is_written: bool
) -> None:
    claim = must_claim(registry.leases(), UnitRef.shard(registry.running_job([0]), 0))
    held, calls = HeldUnit(claim, message_id="m"), list[None]()
    held.on_change(lambda: calls.append(None))

    held.hear(status, mode)

    assert (held.stop_reason, held.is_written) == (reason, is_written)
    assert len(calls) == (reason is not None or is_written)


def _claim(number: int) -> Claim:
    return Claim(UnitRef.shard("j", number), "1:t", RunMode.RUN, None, 0, 5, "t", 0, 1, (0,))


def test_the_unit_of_a_message_is_told_to_stop_and_no_other() -> None:
    held_units = HeldUnits()
    mine, other = held_units.hold(_claim(0), message_id="mine"), held_units.hold(_claim(1), message_id="other")
    held_units.stop_message("mine", StopReason.RELEASED)
    assert (mine.stop_reason, other.stop_reason) == (StopReason.RELEASED, None)


def test_a_message_stopped_during_its_claim_stops_the_unit_once_held() -> None:
    held_units = HeldUnits()
    held_units.stop_message("mine", StopReason.RELEASED)
    mine = held_units.hold(_claim(0), message_id="mine")
    assert mine.stop_reason is StopReason.RELEASED
    held_units.remove(mine)
    assert held_units.hold(_claim(1), message_id="mine").stop_reason is None


def test_who_asked_is_told_when_a_unit_is_held_and_when_no_more() -> None:
    begun: list[HeldUnit] = []
    ended: list[HeldUnit] = []
    held_units = HeldUnits(on_held=begun.append, on_removed=ended.append)
    mine = held_units.hold(_claim(0), message_id="mine")
    assert not held_units.wait_empty(0)
    assert (begun, ended) == ([mine], [])
    held_units.remove(mine)
    assert held_units.wait_empty(0)
    assert (begun, ended) == ([mine], [mine])


def _reaper(units: Units, due_units: ReapQueue | None = None, is_well: Callable[[], bool] = lambda: True) -> Reaper:
    queue = due_units or units.registry.reap_queue(grace_s=0.1)
    return Reaper(queue, units.announcer, units.closer, interval_s=0.05, is_well=is_well, offer=lambda: False)


def test_a_worker_that_hangs_puts_no_unit_off(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    registry.make_due()
    looks: list[None] = []

    def hangs() -> bool:
        looks.append(None)
        return False

    with running_units(registry) as units, running_thread(_reaper(units, is_well=hangs).run):
        wait_until(lambda: len(looks) > 3)
    assert [due.ref for due in registry.reap_queue().due()] == [UnitRef.shard(job_id, 0)]


def test_with_each_look_shards_without_a_message_are_offered(registry: TestRegistry) -> None:
    offers: list[float] = []

    def look() -> bool:
        offers.append(time.monotonic())
        return True

    with running_units(registry) as units:
        due = registry.reap_queue()
        reaper = Reaper(due, units.announcer, units.closer, interval_s=0.05, is_well=lambda: True, offer=look)
        with running_thread(reaper.run):
            wait_until(lambda: len(offers) > OFFER_LOOKS)
    first, *_, last = offers[:OFFER_LOOKS]
    assert last - first >= PATIENCE_S  # so that one that waits all the while is announced at the last


def test_lost_messages_are_sent_again(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1], options=SubmitOptions(priority=8))
    with running_units(registry) as units:
        units.hold(UnitRef.shard(job_id, 0))
        registry.make_due()
        with running_thread(_reaper(units).run):
            wait_until(lambda: units.announcer.announced)
        assert set(units.announcer.announced) == {(UnitRef.shard(job_id, 1), 8)}


def test_units_of_jobs_that_are_to_end_are_closed_without_a_message(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    job_id = registry.running_job([0], [1])
    registry.control.cancel(job_id)
    with running_units(registry) as units:
        with running_thread(_reaper(units).run):
            wait_until(lambda: registry.status(job_id).status is JobState.CANCELLED)
        assert units.announcer.announced == []
    [end] = [record for record in caplog.records if record.message == "job finished"]
    assert end.__dict__["job_id"] == job_id


def test_a_reaper_outlives_a_redis_that_is_away(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    answers: list[list[DueUnit] | Exception] = [redis.ConnectionError("away")]
    due = DueUnit(UnitRef.shard("s0-" + "0" * 36, 1), 4, should_close=False)

    def scripted() -> list[DueUnit]:
        answer = answers.pop(0) if answers else [due]
        if isinstance(answer, Exception):
            raise answer
        return answer

    queue = registry.reap_queue()
    monkeypatch.setattr(queue, "due", scripted)
    with (
        caplog.at_level(logging.WARNING),
        running_units(registry) as units,
        running_thread(_reaper(units, queue).run),
    ):
        wait_until(lambda: units.announcer.announced)
    assert "away" in caplog.text
    assert units.announcer.announced[0] == (due.ref, 4)
