"""What becomes of units whose acknowledged records Redis has lost: by a power cut, or a failover to a late replica."""

from __future__ import annotations

from functools import partial

import pytest
import redis

from tests.support.registry import TestRegistry, failure, forgotten, must_claim, ok, running_units
from tests.support.request_lines import completion_line
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.registry.lifecycle import ClaimRefusal, PutStatus, RunMode, StopReason
from worker.schemas import JobState


def test_a_write_after_lost_records_gives_the_unit_back(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1, 2]), 0)
    claim = must_claim(leases, shard)
    leases.put(claim, [ok(0)])
    with forgotten(registry):
        assert leases.put(claim, [ok(1)])[0] is PutStatus.OPEN
    assert leases.put(claim, [ok(2)]) == (PutStatus.REWOUND, RunMode.RUN)
    again = must_claim(leases, shard)
    assert (again.missing, again.attempts) == ((1, 2), 0)
    assert leases.put(again, [ok(1), ok(2)])[0] is PutStatus.JOB_DONE


def test_a_renewal_after_lost_records_gives_the_unit_back(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    claim = must_claim(leases, shard)
    with forgotten(registry):
        leases.put(claim, [ok(0)])
    assert [status for status, _, _ in leases.renew([claim])] == [PutStatus.REWOUND]
    assert registry.redis.hmget(registry.keys.unit(shard), "st", "att") == [b"queued", b"0"]
    assert registry.shard_queue().choose(UnitRef.shard(shard.job_id, 7), [], only_new_tenants=False) == shard
    assert [due.ref for due in registry.reap_queue().due()] == [shard]


def test_records_that_are_written_again_are_no_loss(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0, 1, 2]), 0))
    for _ in range(3):
        assert leases.put(claim, [ok(0), ok(1)])[0] is PutStatus.OPEN
    assert leases.renew([claim])[0][0] is PutStatus.OPEN


def test_a_successor_knows_of_the_records_before_its_claim(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1, 2]), 0)
    first = must_claim(leases, shard)
    with forgotten(registry):
        leases.put(first, [ok(0)])
        leases.release(first, count_attempt=False)
        second = must_claim(leases, shard)
        assert (second.num_known, second.missing) == (1, (1, 2))
    assert leases.put(second, [ok(1)])[0] is PutStatus.FENCED  # its lease is forgotten too
    assert leases.put(first, [ok(1)])[0] is PutStatus.REWOUND


def test_the_holder_is_told_and_the_message_goes_back(registry: TestRegistry, caplog: pytest.LogCaptureFixture) -> None:
    job_id = registry.running_job([0, 1])
    with running_units(registry) as units:
        held = units.hold(UnitRef.shard(job_id, 0))
        with forgotten(registry):
            units.leases.put(held.claim, [ok(0)])
        held.hear(*units.leases.put(held.claim, [ok(1)]))
        assert (held.stop_reason, held.is_lost) == (StopReason.REWOUND, True)
    assert "Redis has lost records that it had taken" in caplog.text


def test_a_plan_whose_records_are_lost_is_made_again(registry: TestRegistry) -> None:
    job_id = registry.submit([b"{bad", completion_line(), b"{bad too"])
    plan = UnitRef.plan(job_id)
    with running_units(registry) as units:
        planner, held = units.planner(), units.hold(plan)
        with forgotten(registry):
            units.leases.put(held.claim, [failure(job_id, 0, None), failure(job_id, 2, None)])
        assert units.leases.planned(held.claim, [NewShard([1], model="fake")], ageing_s=60.0) is PutStatus.REWOUND
        assert registry.redis.hmget(registry.keys.unit(plan), "st", "att") == [b"queued", b"0"]
        units.held_units.remove(held)
        planner.plan(units.hold(plan))
        job = registry.status(job_id)
        assert (job.request_counts.failed, job.shards_total) == (2, 1)
        units.shard_run(units.hold(UnitRef.shard(job_id, 0))).run()
    assert registry.status(job_id).status is JobState.COMPLETED


def test_a_shard_with_nothing_missing_ends_when_it_is_claimed(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    leases.put(must_claim(leases, shard), [ok(0)])
    registry.redis.hset(registry.keys.records(shard.job_id), "1", "{}")  # of another claim's, whose count is lost
    registry.lapse(shard)
    assert leases.claim(shard) is ClaimRefusal.TERMINAL
    job = registry.status(shard.job_id)
    assert (job.status, job.shards_done, job.waiting_for) == (JobState.COMPLETED, 1, ())
    assert not registry.redis.zcard(registry.keys.open)


def test_lines_that_only_an_old_primary_lacks_are_not_missing(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    claim = must_claim(leases, shard)
    read = partial(leases.lines, shard.job_id, [0, 1], under=claim)
    registry.redis.hdel(registry.keys.lines(shard.job_id), "1")
    assert read() == [b'{"prompt": "a"}', None]  # under the lease
    registry.redis.hset(registry.keys.unit(shard), "tok", "1:of the primary that was")
    with pytest.raises(redis.ConnectionError, match="and so is the lease"):
        read()
    registry.redis.delete(registry.keys.unit(shard))
    with pytest.raises(redis.ConnectionError):
        leases.lines_and_resume_states(shard.job_id, [1], under=claim)
    assert leases.lines(shard.job_id, [0], under=claim) == [b'{"prompt": "a"}']


def _without_plan(registry: TestRegistry) -> str:
    """A job of two lines, one of them with a record, that has neither plan nor shards."""
    job_id = registry.running_job([0, 1])
    shard = UnitRef.shard(job_id, 0)
    registry.leases().put(must_claim(registry.leases(), shard), [ok(0)])
    registry.redis.delete(registry.keys.unit(shard))
    registry.redis.zrem(registry.keys.open, str(shard))
    registry.redis.hset(registry.keys.job(job_id), "sd", 1)
    return job_id


def test_a_job_without_plan_and_shards_is_planned_again_by_the_reaper(registry: TestRegistry) -> None:
    job_id, sound, unplanned = _without_plan(registry), registry.running_job([0]), registry.submit([b"x"])
    assert registry.reap_queue().lost_plans() == [UnitRef.plan(job_id)]
    assert registry.reap_queue().lost_plans() == []
    assert [registry.status(other).status for other in (sound, unplanned)] == [
        JobState.IN_PROGRESS,
        JobState.VALIDATING,
    ]
    with running_units(registry) as units:
        units.planner().plan(units.hold(UnitRef.plan(job_id)))
        assert units.hold(UnitRef.shard(job_id, 0)).claim.missing == (1,)
    assert (registry.status(job_id).shards_total, registry.status(job_id).shards_done) == (1, 0)


def test_a_job_without_plan_and_shards_can_be_cancelled(registry: TestRegistry) -> None:
    job_id = _without_plan(registry)
    with running_units(registry) as units:
        for ref in registry.control.cancel(job_id):
            units.closer.close_unclaimed(ref)
    job = registry.status(job_id)
    assert (job.status, job.request_counts.completed, job.request_counts.cancelled) == (JobState.CANCELLED, 1, 1)
