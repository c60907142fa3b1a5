from __future__ import annotations

import time

from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.schemas import SubmitOptions


def _score_in_s(registry: TestRegistry, ref: UnitRef) -> float:
    score = registry.redis.zscore(registry.keys.open, str(ref))
    assert score is not None
    return float(score) / 1000 - time.time()


def test_a_queued_unit_is_left_alone_until_its_grace_is_over(registry: TestRegistry) -> None:
    registry.submit([b"x"])
    assert registry.reap_queue().due() == []


def test_a_queued_unit_whose_message_is_lost_is_announced_by_one_reaper(registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"], SubmitOptions(priority=7))
    registry.make_due()
    due = registry.reap_queue().due()
    assert [(unit.ref, unit.should_close, unit.priority) for unit in due] == [(UnitRef.plan(job_id), False, 7)]
    assert registry.reap_queue().due() == []


def test_the_grace_doubles_with_every_announcement(registry: TestRegistry) -> None:
    plan = UnitRef.plan(registry.submit([b"x"]))
    waits = []
    for _ in range(7):
        registry.make_due()
        registry.reap_queue(grace_s=30).due()
        waits.append(round(_score_in_s(registry, plan)))
    assert waits == [30, 60, 120, 240, 480, 600, 600]


def test_a_queued_unit_is_not_announced_while_its_lane_holds_messages(registry: TestRegistry) -> None:
    registry.running_job([0], options=SubmitOptions(priority=7))
    registry.redis.lpush("millrace\x06\x166", "a message")
    registry.make_due()
    assert registry.reap_queue().due() == []
    registry.redis.delete("millrace\x06\x166")
    registry.redis.lpush("millrace", "another lane's message")
    registry.make_due()
    assert len(registry.reap_queue().due()) == 1


def test_a_plan_waits_in_the_first_lane_whatever_its_priority(registry: TestRegistry) -> None:
    registry.submit([b"x"], SubmitOptions(priority=7))
    registry.redis.lpush("millrace", "a message")
    registry.make_due()
    assert registry.reap_queue().due() == []
    registry.redis.delete("millrace")
    registry.redis.lpush("millrace\x06\x166", "another lane's message")
    registry.make_due()
    assert len(registry.reap_queue().due()) == 1


def test_a_unit_that_waited_ten_minutes_is_announced_even_so(registry: TestRegistry) -> None:
    plan = UnitRef.plan(registry.submit([b"x"]))
    registry.redis.lpush("millrace", "a message")
    registry.redis.hincrby(registry.keys.unit(plan), "since", -600_001)
    registry.make_due()
    assert [unit.ref for unit in registry.reap_queue().due()] == [plan]


def test_a_dead_workers_unit_is_announced_and_a_live_ones_is_not(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1])
    must_claim(registry.leases(lease_s=0.05), UnitRef.shard(job_id, 0))
    must_claim(registry.leases(), UnitRef.shard(job_id, 1))
    time.sleep(0.06)
    registry.make_due()
    assert [unit.ref for unit in registry.reap_queue().due()] == [UnitRef.shard(job_id, 0)]
    assert 25 < _score_in_s(registry, UnitRef.shard(job_id, 1)) <= 31


def test_units_of_a_cancelled_job_are_to_be_closed_at_once(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1])
    must_claim(registry.leases(), UnitRef.shard(job_id, 0))
    registry.control.cancel(job_id)
    due = registry.reap_queue().due()
    assert [(unit.ref, unit.should_close) for unit in due] == [(UnitRef.shard(job_id, 1), True)]


def test_units_of_an_expired_job_are_to_be_closed_when_it_expires(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], options=SubmitOptions(deadline_s=0.05))
    time.sleep(0.06)
    due = registry.reap_queue().due()
    assert [(unit.ref, unit.should_close) for unit in due] == [(UnitRef.shard(job_id, 0), True)]


def test_units_of_forgotten_jobs_are_dropped(registry: TestRegistry) -> None:
    job_id = registry.submit([b"x"])
    registry.redis.delete(registry.keys.job(job_id))
    registry.make_due()
    assert registry.reap_queue().due() == []
    assert registry.redis.zcard(registry.keys.open) == 0


def _waits(registry: TestRegistry, ref: UnitRef, seconds: float) -> None:
    registry.redis.hincrby(registry.keys.unit(ref), "first", -round(seconds * 1000))
    registry.make_due()


def test_a_shard_that_waits_is_announced_in_better_and_better_lanes(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0], options=SubmitOptions(priority=9)), 0)
    for lane in ("millrace", "millrace\x06\x163", "millrace\x06\x166", "millrace\x06\x169"):
        registry.redis.lpush(lane, "a message")  # a flood
    queue = registry.reap_queue(ageing_s=10)
    announced = []
    for _ in range(12):
        _waits(registry, shard, 10)
        announced += [due.priority for due in queue.due()]
    assert announced == [8, 5, 2]  # the first of each lane; better than the first lane there is none
    assert registry.redis.hget(registry.keys.unit(shard), "lane") == b"2"


def test_a_shard_is_looked_at_when_it_has_waited_for_the_next_lane(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0], options=SubmitOptions(priority=7)), 0)
    registry.redis.lpush("millrace\x06\x166", "a message")
    queue = registry.reap_queue(grace_s=600, ageing_s=10)
    registry.make_due()
    assert queue.due() == []
    assert 15 < _score_in_s(registry, shard) <= 20  # priority 7 is 5, and in the lane of 3, after two steps


def test_a_release_does_not_make_a_shard_young_again(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0], options=SubmitOptions(priority=9)), 0)
    for lane in ("millrace\x06\x166", "millrace\x06\x169"):
        registry.redis.lpush(lane, "a message")
    queue = registry.reap_queue(ageing_s=10)
    _waits(registry, shard, 10)
    assert [due.priority for due in queue.due()] == [8]
    leases.release(must_claim(leases, shard), count_attempt=False)
    registry.make_due()
    assert [due.priority for due in queue.due()] == [8]  # its message went back to the lane it came from
    registry.make_due()
    assert queue.due() == []
