"""What is reaped: leases that ran out, jobs past their time, and jobs whose file is refused as a whole."""

from __future__ import annotations

import time

import pytest

from tests.support.processes import wait_until
from tests.support.redis_servers import lose_next_script_reply
from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import ClaimRefusal, PutStatus, RunMode
from worker.schemas import BatchError, JobState, SubmitOptions

BAD = (BatchError(code="invalid_json_line", message="not JSON", line=2),)
FAILED = (PutStatus.JOB_DONE, RunMode.RUN)


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
    registry.redis.lpush("millrace.fake\x06\x166", "a message")
    registry.make_due()
    assert registry.reap_queue().due() == []
    registry.redis.delete("millrace.fake\x06\x166")
    registry.redis.lpush("millrace.fake", "another lane's message")
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
    must_claim(registry.leases(), UnitRef.shard(job_id, 0))
    must_claim(registry.leases(), UnitRef.shard(job_id, 1))
    registry.lapse(UnitRef.shard(job_id, 0))
    registry.make_due()
    assert [unit.ref for unit in registry.reap_queue().due()] == [UnitRef.shard(job_id, 0)]
    assert 10 < _score_in_s(registry, UnitRef.shard(job_id, 1)) <= 15  # when half of its lease is over


def test_units_of_a_cancelled_job_are_to_be_closed_at_once(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], [1])
    must_claim(registry.leases(), UnitRef.shard(job_id, 0))
    registry.control.cancel(job_id)
    due = registry.reap_queue().due()
    assert [(unit.ref, unit.should_close) for unit in due] == [(UnitRef.shard(job_id, 1), True)]


def test_units_of_an_expired_job_are_to_be_closed_when_it_expires(registry: TestRegistry) -> None:
    job_id = registry.running_job([0], options=SubmitOptions(deadline_s=0.05))
    deadline_s = registry.time_s() + 0.05  # not before the job's
    wait_until(lambda: registry.time_s() > deadline_s)
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
    for lane in ("millrace.fake", "millrace.fake\x06\x163", "millrace.fake\x06\x166", "millrace.fake\x06\x169"):
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
    registry.redis.lpush("millrace.fake\x06\x166", "a message")
    queue = registry.reap_queue(grace_s=600, ageing_s=10)
    registry.make_due()
    assert queue.due() == []
    assert 15 < _score_in_s(registry, shard) <= 20  # priority 7 is 5, and in the lane of 3, after two steps


def test_a_release_does_not_make_a_shard_young_again(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0], options=SubmitOptions(priority=9)), 0)
    for lane in ("millrace.fake\x06\x166", "millrace.fake\x06\x169"):
        registry.redis.lpush(lane, "a message")
    queue = registry.reap_queue(ageing_s=10)
    _waits(registry, shard, 10)
    assert [due.priority for due in queue.due()] == [8]
    leases.release(must_claim(leases, shard), count_attempt=False)
    registry.make_due()
    assert [due.priority for due in queue.due()] == [8]  # its message went back to the lane it came from
    registry.make_due()
    assert queue.due() == []


def test_a_refused_file_gives_back_what_its_job_had(registry: TestRegistry) -> None:
    options = SubmitOptions(strict=True, tenant="acme", idempotency_key="k")
    job_id = registry.submit([b"a", b"b", b"c"], options)
    leases = registry.leases()
    assert leases.fail(must_claim(leases, UnitRef.plan(job_id)), "1 line is bad", BAD) == FAILED
    job = registry.status(job_id)
    assert (job.status, job.error, job.errors) == (JobState.FAILED, "1 line is bad", BAD)
    assert job.finished_at is not None
    keys, bare = registry.keys, registry.redis
    assert bare.hmget(keys.counters, "prompts", "bytes", "jobs") == [b"0", b"0", b"0"]
    assert not bare.exists(keys.tenant_counters("acme"), keys.lines(job_id), keys.unit(UnitRef.plan(job_id)))
    assert bare.zcard(keys.open) == 0
    assert all(bare.ttl(key) > 0 for key in (keys.job(job_id), keys.idempotency("acme", "k")))
    assert leases.claim(UnitRef.plan(job_id)) is ClaimRefusal.TERMINAL


def test_a_refusal_whose_reply_is_lost_is_one_refusal(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases()
    other = registry.submit([b"so that Redis knows the script"])
    assert leases.fail(must_claim(leases, UnitRef.plan(other)), "bad", BAD) == FAILED
    job_id = registry.submit([b"a"])
    claim = must_claim(leases, UnitRef.plan(job_id))
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    assert leases.fail(claim, "bad", BAD) == FAILED
    assert lost
    assert registry.redis.hget(registry.keys.counters, "jobs") == b"0"


def test_a_plan_that_is_another_workers_cannot_be_refused(registry: TestRegistry) -> None:
    job_id = registry.submit([b"a"])
    leases = registry.leases()
    old = must_claim(leases, UnitRef.plan(job_id))
    leases.release(old, count_attempt=False)
    must_claim(leases, UnitRef.plan(job_id))
    assert leases.fail(old, "bad", BAD) == (PutStatus.FENCED, RunMode.RUN)
    assert registry.status(job_id).status is JobState.VALIDATING


@pytest.mark.parametrize(
    ("options", "version"), [({}, b"1"), ({"strict": True}, b"2"), ({"endpoint": "/v1/completions"}, b"2")]
)
def test_only_workers_that_know_what_a_job_asks_for_take_it(
    registry: TestRegistry, options: dict[str, object], version: bytes
) -> None:
    """Workers of the version before leave version 2 alone."""
    job_id = registry.submit([b"a"], SubmitOptions.model_validate(options))
    assert registry.redis.hget(registry.keys.job(job_id), "v") == version
    claim = must_claim(registry.leases(), UnitRef.plan(job_id))
    assert (claim.is_strict, claim.endpoint) == (options.get("strict", False), options.get("endpoint"))


def test_a_job_of_the_version_before_is_neither_strict_nor_of_one_endpoint(registry: TestRegistry) -> None:
    job_id = registry.submit([b"a"])
    registry.redis.hdel(registry.keys.job(job_id), "strict", "url")
    claim = must_claim(registry.leases(), UnitRef.plan(job_id))
    assert (claim.is_strict, claim.endpoint) == (False, None)
    assert registry.status(job_id).endpoint == ""


A_DAY_MS = 24 * 3600 * 1000


def _after_the_clock_went_back(registry: TestRegistry, ref: UnitRef, **fields: int) -> None:
    """Write times of a unit, and of when to look at it, as of a day ahead."""
    later_ms = round(registry.time_s() * 1000) + A_DAY_MS
    unit = registry.keys.unit(ref)
    registry.redis.hset(unit, mapping={name: later_ms + add for name, add in fields.items()})
    registry.redis.zadd(registry.keys.open, {str(ref): later_ms})


def test_a_lost_message_is_found_although_the_clock_went_back(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0], options=SubmitOptions(priority=5)), 0)
    _after_the_clock_went_back(registry, shard, since=0, first=0)
    assert [(due.ref, due.priority) for due in registry.reap_queue().due()] == [(shard, 5)]
    assert 25 < _score_in_s(registry, shard) <= 30


def test_a_dead_workers_lease_ends_although_the_clock_went_back(registry: TestRegistry) -> None:
    shard, leases = UnitRef.shard(registry.running_job([0]), 0), registry.leases()
    must_claim(registry.leases(owner="dead"), shard)
    _after_the_clock_went_back(registry, shard, lease=30_000)
    queue = registry.reap_queue(patience_s=0.2)
    wait_until(lambda: [due.ref for due in queue.due()] == [shard])
    assert leases.claim(shard) is ClaimRefusal.SUSPECT
    must_claim(leases, shard, alone=True)
    assert 25 < registry.lease_left_s(shard) <= 30


def test_a_live_workers_lease_is_its_own_although_the_clock_went_back(registry: TestRegistry) -> None:
    shard, leases = UnitRef.shard(registry.running_job([0]), 0), registry.leases()
    claim = must_claim(leases, shard)
    _after_the_clock_went_back(registry, shard, lease=30_000)
    assert leases.renew([claim])[0][0] is PutStatus.OPEN
    assert 25 < registry.lease_left_s(shard) <= 30
    assert 10 < _score_in_s(registry, shard) <= 15
    assert registry.reap_queue(patience_s=0.0).due() == []
