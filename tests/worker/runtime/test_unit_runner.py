"""Units by the messages they came by: taken, run, given back."""

from __future__ import annotations

import threading
import time
import traceback
from collections.abc import Sequence

import pytest
import redis

from settings import WorkerSettings
from tests.support.processes import is_waiting, wait_until
from tests.support.registry import TestRegistry, Units, must_claim, ok, running_units
from worker.broker.messages import MessageEnd
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import ClaimRefusal, StopReason
from worker.runtime.held_units import HeldUnit
from worker.runtime.shard import Turn
from worker.runtime.unit_runner import CONFIRM_S, PATIENCE_S, ShardSlots, UnitFailed
from worker.schemas import JobState, SubmitOptions

START_S = time.monotonic()


def _no_work(_held: HeldUnit) -> None:
    raise AssertionError("there was nothing to run")


def test_a_finished_unit_acknowledges_its_message(registry: TestRegistry) -> None:
    job_id = registry.running_job([0])
    with running_units(registry) as units:

        def work(held: HeldUnit) -> None:
            assert held.claim.ref in units.held_units
            units.leases.put(held.claim, [ok(0)])
            held.set_written()

        assert units.runner().run(UnitRef.shard(job_id, 0), "m", work) is MessageEnd.DONE
        assert len(units.held_units) == 0
    assert registry.status(job_id).status is JobState.COMPLETED


def test_messages_of_units_that_are_held_or_finished_are_acknowledged(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1])
    with running_units(registry) as units:
        runner = units.runner()
        units.hold(UnitRef.shard(job_id, 0))  # by this worker
        must_claim(registry.leases(owner="other"), UnitRef.shard(job_id, 1))
        for unit in (UnitRef.shard(job_id, 0), UnitRef.shard(job_id, 1), UnitRef.plan(job_id)):
            assert runner.run(unit, "m", _no_work) is MessageEnd.DONE


def test_a_message_whose_shard_was_taken_runs_the_one_that_was_left(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id = registry.running_job([0], [1])
    taken, left = UnitRef.shard(job_id, 0), UnitRef.shard(job_id, 1)
    ran: list[UnitRef] = []
    with running_units(registry) as units:
        claim = units.leases.claim

        def overtaken(ref: UnitRef, *, alone: bool = False) -> Claim | ClaimRefusal:
            # The other worker came with the message about `left`, and chose as we did.
            if ref == taken:
                registry.leases(owner="other").claim(taken)
            return claim(ref, alone=alone)

        monkeypatch.setattr(units.leases, "claim", overtaken)

        def work(held: HeldUnit) -> None:
            ran.append(held.claim.ref)
            units.leases.put(held.claim, [ok(held.claim.missing[0])])
            held.set_written()

        assert units.runner().run(taken, "m", work) is MessageEnd.DONE
    assert ran == [left]


def test_a_shard_that_waits_without_a_message_is_announced_to_a_free_slot(registry: TestRegistry) -> None:
    first, second = (UnitRef.shard(registry.running_job([0]), 0) for _ in range(2))
    with running_units(registry) as units:
        slots = _slots(registry, units, max_shards=1)
        _look_twice(slots)
        assert (units.announcer.announced, units.announcer.models) == ([(first, 5)], ["fake"])
        units.hold(first)
        _look_twice(slots)  # no slot is free
        assert len(units.announcer.announced) == 1
        _look_twice(_slots(registry, units, model="other"))
        assert len(units.announcer.announced) == 1  # not its model
        free = _slots(registry, units)
        registry.redis.lpush("millrace", "a plan's message")  # which brings nobody to a shard
        _look_twice(free)
        assert units.announcer.announced[1:] == [(second, 5)]
        units.hold(second)
        _look_twice(free)
        assert len(units.announcer.announced) == 2


@pytest.mark.parametrize("lane", ["millrace.fake", "millrace.fake\x06\x166"])
def test_messages_that_wait_hide_a_lost_wake_up_for_less_than_a_second(registry: TestRegistry, lane: str) -> None:
    lost = UnitRef.shard(registry.running_job([0]), 0)
    registry.redis.lpush(lane, "a message about another shard")
    with running_units(registry) as units:
        slots = _slots(registry, units)
        assert _looks(slots, units, [0.0, CONFIRM_S, 1.01 * PATIENCE_S]) == [[], [], [(lost, 5)]]
        assert WorkerSettings().reap_interval_s + PATIENCE_S <= 0.75  # and a quarter of a second to claim it
        # Each announcement adds a message: it waits for twice as long before the next.
        later = [times * PATIENCE_S for times in (2.9, 3.1, 6.9, 7.2)]
        assert [len(found) for found in _looks(slots, units, later)] == [1, 2, 2, 3]


def test_a_shard_that_others_take_while_messages_wait_is_not_announced(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1], [2])
    registry.redis.lpush("millrace.fake", "a message")
    with running_units(registry) as units:
        slots = _slots(registry, units)
        for number in range(3):
            at_s = 1.5 * number * PATIENCE_S
            assert _looks(slots, units, [at_s, at_s + 0.9 * PATIENCE_S]) == [[], []]
            units.hold(UnitRef.shard(job_id, number))


def _slots(registry: TestRegistry, units: Units, *, max_shards: int = 9, model: str = "fake") -> ShardSlots:
    queue = registry.shard_queue(models=[model])
    return ShardSlots(queue, units.held_units, units.announcer, max_shards, turn=Turn())


def _looks(slots: ShardSlots, units: Units, at_s: Sequence[float]) -> list[list[tuple[UnitRef, int]]]:
    """What was announced after looks at these times after the test's start."""
    found: list[list[tuple[UnitRef, int]]] = []
    for second in at_s:
        with pytest.MonkeyPatch.context() as now:
            now.setattr(time, "monotonic", lambda at=START_S + second: at)
            slots.offer()
        found.append(list(units.announcer.announced))
    return found


def _look_twice(slots: ShardSlots) -> None:
    """Two looks with time for a message between them."""
    with pytest.MonkeyPatch.context() as now:
        slots.offer()
        later = time.monotonic() + CONFIRM_S
        now.setattr(time, "monotonic", lambda: later)
        slots.offer()


def test_a_shard_whose_message_may_be_on_its_way_is_not_announced(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:
        slots = _slots(registry, units)
        with pytest.MonkeyPatch.context() as now:
            at = time.monotonic()
            now.setattr(time, "monotonic", lambda: at)
            for _ in range(3):
                slots.offer()
        assert units.announcer.announced == []
        _look_twice(slots)
        assert units.announcer.announced == [(shard, 5)]


def test_after_a_shard_its_thread_goes_on_with_one_that_has_no_message(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1], [2])
    ran: list[UnitRef] = []
    with running_units(registry) as units:

        def work(held: HeldUnit) -> None:
            ran.append(held.claim.ref)
            units.leases.put(held.claim, [ok(held.claim.missing[0])])
            held.set_written()

        assert units.runner().run(UnitRef.shard(job_id, 1), "m", work) is MessageEnd.DONE
        assert sorted(map(str, ran)) == [str(UnitRef.shard(job_id, number)) for number in range(3)]
        assert (units.announcer.announced, len(units.held_units)) == ([], 0)


def test_a_thread_of_a_worker_that_hangs_goes_on_with_nothing(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1])
    ran: list[UnitRef] = []
    with running_units(registry) as units:

        def work(held: HeldUnit) -> None:
            ran.append(held.claim.ref)  # and the engine hangs from now on
            units.leases.put(held.claim, [ok(held.claim.missing[0])])
            held.set_written()

        assert units.runner(is_well=lambda: not ran).run(UnitRef.shard(job_id, 0), "m", work) is MessageEnd.DONE
        assert len(ran) == 1
        must_claim(registry.leases(owner="other"), UnitRef.shard(job_id, 1))


def test_a_thread_leaves_its_slot_to_a_message_that_waits_for_one(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.unit_runner.SLOT_WAIT_S", 30.0)
    job_id = registry.running_job([0], [1], [2])
    first, second = UnitRef.shard(job_id, 0), UnitRef.shard(job_id, 1)
    ran: list[tuple[UnitRef, str]] = []
    with running_units(registry) as units:
        runner = units.runner(max_shards=1)
        other = threading.Thread(target=lambda: runner.run(second, "other", work))

        def work(held: HeldUnit) -> None:
            ran.append((held.claim.ref, held.message_id))
            if len(ran) == 1:
                other.start()
                wait_until(lambda: is_waiting(other))
            units.leases.put(held.claim, [ok(held.claim.missing[0])])
            held.set_written()

        assert runner.run(first, "m", work) is MessageEnd.DONE
        other.join()
        assert [message for _, message in ran] == ["m", "other", "other"]


def test_what_a_thread_goes_on_with_and_gives_back_has_a_message_again(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1])
    with running_units(registry) as units:

        def work(held: HeldUnit) -> None:
            if held.claim.ref == UnitRef.shard(job_id, 1):
                held.stop(StopReason.RELEASED)
                runner.drain()
                return
            units.leases.put(held.claim, [ok(held.claim.missing[0])])
            held.set_written()

        runner = units.runner()
        assert runner.run(UnitRef.shard(job_id, 0), "m", work) is MessageEnd.REQUEUE


def test_a_draining_worker_claims_nothing(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:
        runner = units.runner()
        runner.drain()
        assert runner.run(shard, "m", _no_work) is MessageEnd.REQUEUE
        must_claim(units.leases, shard)


def test_a_worker_that_hangs_claims_nothing(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.unit_runner.UNWELL_PAUSE_S", 0.01)
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:
        assert units.runner(is_well=lambda: False).run(shard, "m", _no_work) is MessageEnd.REQUEUE
        must_claim(units.leases, shard)


@pytest.mark.parametrize(
    ("reason", "end", "attempts"),
    [
        (StopReason.RELEASED, MessageEnd.REQUEUE, 0),
        (StopReason.ENGINE_FAILED, MessageEnd.REQUEUE, 1),
    ],
)
def test_an_unfinished_unit_goes_back(
    registry: TestRegistry, reason: StopReason, end: MessageEnd, attempts: int
) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:
        assert units.runner().run(shard, "m", lambda held: held.stop(reason)) is end
        assert must_claim(units.leases, shard, alone=True).attempts == attempts


@pytest.mark.parametrize(
    ("error", "attempts", "reason"),
    [
        (redis.ConnectionError("a secret"), 0, StopReason.RELEASED),
        (ZeroDivisionError("a secret"), 1, StopReason.FAILED),
    ],
)
def test_a_defect_counts_as_an_attempt_and_a_lost_redis_does_not(
    registry: TestRegistry, error: Exception, attempts: int, reason: StopReason
) -> None:
    held_units: list[HeldUnit] = []
    shard = UnitRef.shard(registry.running_job([0]), 0)

    def work(held: HeldUnit) -> None:
        held_units.append(held)
        raise error

    with running_units(registry) as units:
        with pytest.raises(UnitFailed, match=f"^{type(error).__name__}$") as caught:
            units.runner().run(shard, "m", work)
        assert "secret" not in "".join(traceback.format_exception(caught.value))
        assert held_units[0].stop_reason is reason
        assert len(units.held_units) == 0
        assert must_claim(units.leases, shard, alone=True).attempts == attempts


def test_a_redis_that_is_away_on_a_claim_is_a_line_in_the_log(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)

    def away(*_: object, **__: object) -> None:
        raise redis.ConnectionError("refused")

    with running_units(registry) as units:
        monkeypatch.setattr(units.leases, "claim", away)
        with pytest.raises(UnitFailed, match=r"^ConnectionError$") as caught:
            units.runner().run(shard, "m", _no_work)
        assert "refused" not in "".join(traceback.format_exception(caught.value))

    [record] = [record for record in caplog.records if "no unit could be claimed: refused" in record.message]
    assert (record.__dict__["job_id"], record.__dict__["shard"], record.exc_info) == (shard.job_id, 0, None)


def test_units_of_a_cancelled_job_are_closed_instead_of_run(registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1])
    registry.control.cancel(job_id)
    with running_units(registry) as units:
        assert units.runner().run(UnitRef.shard(job_id, 0), "m", _no_work) is MessageEnd.DONE
    job = registry.status(job_id)
    assert (job.status, job.request_counts.failed) == (JobState.CANCELLED, 2)


def test_a_full_worker_gives_shards_back_unclaimed_and_still_plans(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.unit_runner.SLOT_WAIT_S", 0.05)
    job_id, queued = registry.running_job([0], [1]), registry.submit([b"x"])
    running, finish = threading.Event(), threading.Event()

    def work(_held: HeldUnit) -> None:
        running.set()
        finish.wait(10)

    with running_units(registry) as units:
        runner = units.runner(max_shards=1)
        busy = threading.Thread(target=runner.run, args=(UnitRef.shard(job_id, 0), "m", work))
        busy.start()
        assert running.wait(20)
        assert runner.run(UnitRef.shard(job_id, 1), "n", _no_work) is MessageEnd.REQUEUE
        assert registry.redis.hget(registry.keys.unit(UnitRef.shard(job_id, 1)), "st") == b"queued"
        planned: list[HeldUnit] = []
        assert runner.run(UnitRef.plan(queued), "p", planned.append) is MessageEnd.DONE
        assert len(planned) == 1
        finish.set()
        busy.join(20)
        assert runner.run(UnitRef.shard(job_id, 1), "n", lambda held: held.set_written()) is MessageEnd.DONE


def test_a_unit_goes_back_only_after_what_finished_is_written(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.unit_runner.FLUSH_TIMEOUT_S", 60.0)
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    with running_units(registry) as units:

        def work(held: HeldUnit) -> None:
            held.add_unwritten(1)
            held.stop(StopReason.RELEASED)

        runner = threading.Thread(target=units.runner().run, args=(shard, "m", work))
        runner.start()
        wait_until(lambda: shard in units.held_units)
        wait_until(lambda: is_waiting(runner))
        assert registry.redis.hget(registry.keys.unit(shard), "st") == b"running"
        [held] = units.held_units.all()
        held.add_unwritten(-1)
        runner.join(20)
        assert registry.redis.hget(registry.keys.unit(shard), "st") == b"queued"


def test_a_unit_whose_last_record_is_written_on_the_way_out_is_done(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    with running_units(registry) as units:

        def work(held: HeldUnit) -> None:
            held.stop(StopReason.RELEASED)
            assert units.writer.put(held, [ok(0)])

        assert units.runner().run(shard, "m", work) is MessageEnd.DONE
    assert registry.status(shard.job_id).status is JobState.COMPLETED


def test_a_message_is_for_the_shard_of_whoever_has_least_here(registry: TestRegistry) -> None:
    large = registry.running_job([0], [1], options=SubmitOptions(tenant="large"))
    small = registry.running_job([0], options=SubmitOptions(tenant="small"))
    ran: list[UnitRef] = []

    def work(held: HeldUnit) -> None:
        ran.append(held.claim.ref)
        units.leases.put(held.claim, [ok(index) for index in held.claim.missing])
        held.set_written()

    with running_units(registry) as units:
        units.hold(UnitRef.shard(large, 0))
        runner = units.runner()
        ends = [runner.run(UnitRef.shard(large, 1), "m", work) for _ in range(3)]
    assert ran == [UnitRef.shard(small, 0), UnitRef.shard(large, 1)]
    assert ends == [MessageEnd.DONE] * 3


def test_a_message_goes_back_while_the_slots_that_are_left_are_for_others(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.unit_runner.SLOT_WAIT_S", 0.01)
    job_id = registry.running_job(*[[number] for number in range(9)])
    with running_units(registry) as units:
        for number in range(7):
            units.hold(UnitRef.shard(job_id, number))
        runner = units.runner(max_shards=8)
        assert runner.run(UnitRef.shard(job_id, 7), "m", _no_work) is MessageEnd.REQUEUE
        assert registry.redis.hget(registry.keys.unit(UnitRef.shard(job_id, 7)), "fence") == b"0"
