"""What one look at the queue tells, over a real Redis."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry import queues as queue_figures
from worker.registry.exchange import text
from worker.registry.keys import UnitRef
from worker.registry.queues import QueueFigures, QueueReading, lanes_by_priority
from worker.schemas import SubmitOptions


def _read(registry: TestRegistry, max_tenants: int = 20) -> QueueReading:
    return QueueFigures(registry.redis, registry.keys, max_tenants=max_tenants).read()


def _job(registry: TestRegistry, tenant: str, num_shards: int, *, priority: int = 5) -> str:
    """A planned job with one line a shard."""
    return registry.running_job(
        *([number] for number in range(num_shards)), options=SubmitOptions(tenant=tenant, priority=priority)
    )


def _age(registry: TestRegistry, job_id: str, numbers: Sequence[int], seconds: int) -> None:
    """Let shards have been queued so long ago."""
    for number in numbers:
        ref = UnitRef.shard(job_id, number)
        tenant = registry.status(job_id).tenant
        registry.redis.hincrby(registry.keys.unit(ref), "first", -1000 * seconds)
        registry.redis.zincrby(f"{registry.keys.queued}:{tenant}", -1000 * seconds, str(ref))


def test_an_empty_redis_has_an_empty_queue(registry: TestRegistry) -> None:
    reading = _read(registry)
    assert (reading.open_jobs, reading.open_units, reading.overdue_s, reading.num_records) == (0, 0, 0, 0)
    assert (reading.backlogs, reading.num_waiting_tenants) == ((), 0)
    assert reading.messages == {0: 0, 3: 0, 6: 0, 9: 0}
    assert reading.ended_jobs == {"completed": 0, "failed": 0, "cancelled": 0, "expired": 0}


def test_jobs_prompts_and_records_are_counted_for_all_time(registry: TestRegistry) -> None:
    leases = registry.leases()
    done, cancelled = _job(registry, "a", 2), registry.submit([b'{"prompt": "a"}'] * 3)
    for number in range(2):
        leases.put(must_claim(leases, UnitRef.shard(done, number)), [ok(number)])
    open_job = _job(registry, "a", 4)
    reading = _read(registry)
    assert (reading.submitted_jobs, reading.submitted_prompts, reading.num_records) == (3, 9, 2)
    assert (reading.open_jobs, reading.open_prompts, reading.open_units) == (2, 7, 5)
    assert reading.open_bytes == 7 * len(b'{"prompt": "a"}')
    assert reading.ended_jobs == {"completed": 1, "failed": 0, "cancelled": 0, "expired": 0}
    registry.control.cancel(cancelled)
    claim = must_claim(leases, UnitRef.plan(cancelled))
    leases.put(claim, [ok(index) for index in claim.missing])
    assert _read(registry).ended_jobs["cancelled"] == 1
    assert open_job in {job.id for job in registry.jobs()}


def test_waiting_shards_are_told_apart_by_tenant_and_priority_with_the_age_of_the_oldest(
    registry: TestRegistry,
) -> None:
    first, urgent, other = (
        _job(registry, "a", 3, priority=5),
        _job(registry, "a", 2, priority=0),
        _job(registry, "b", 1, priority=5),
    )
    _age(registry, first, [0, 1, 2], 50)
    _age(registry, first, [1], 40)
    _age(registry, urgent, [1], 20)
    _age(registry, other, [0], 7)
    by_tenant = {backlog.tenant: backlog for backlog in _read(registry).backlogs}
    assert {tenant: backlog.open_prompts for tenant, backlog in by_tenant.items()} == {"a": 5, "b": 1}
    found = {
        (tenant, priority): (count, round(oldest_s))
        for tenant, backlog in by_tenant.items()
        for priority, (count, oldest_s) in backlog.waiting.items()
    }
    assert found == {("a", 5): (3, 90), ("a", 0): (2, 20), ("b", 5): (1, 7)}


def test_a_shard_that_somebody_holds_does_not_wait(registry: TestRegistry) -> None:
    job_id = _job(registry, "a", 2)
    must_claim(registry.leases(), UnitRef.shard(job_id, 0))
    [backlog] = _read(registry).backlogs
    assert (backlog.open_prompts, [count for count, _ in backlog.waiting.values()]) == (2, [1])


def test_only_the_tenants_with_the_longest_queues_are_told_apart(registry: TestRegistry) -> None:
    for tenant, num_shards in (("a", 1), ("b", 4), ("c", 3), ("d", 2)):
        _job(registry, tenant, num_shards)
    reading = _read(registry, max_tenants=2)
    assert {backlog.tenant for backlog in reading.backlogs} == {"b", "c"}
    assert (reading.num_waiting_tenants, reading.other_waiting_shards) == (4, 1 + 2)


def test_a_look_reads_no_more_shards_than_its_budget_and_gives_small_queues_theirs_first(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_figures, "MAX_SHARDS", 10)
    for tenant, num_shards in (("a", 30), ("b", 2), ("c", 12)):
        _job(registry, tenant, num_shards)
    backlogs = {backlog.tenant: backlog for backlog in _read(registry).backlogs}
    read = {tenant: sum(count for count, _ in item.waiting.values()) for tenant, item in backlogs.items()}
    assert read == {"b": 2, "c": 4, "a": 4}
    assert {tenant: item.num_unread for tenant, item in backlogs.items()} == {"b": 0, "c": 8, "a": 26}


def test_a_unit_that_nobody_looks_at_becomes_overdue(registry: TestRegistry) -> None:
    job_id = _job(registry, "a", 1)
    registry.redis.zincrby(registry.keys.open, -100_000, f"{job_id}/0")
    assert 60 < _read(registry).overdue_s < 100  # it was due in 30 s


def test_messages_dead_units_and_dead_frames_are_counted(registry: TestRegistry) -> None:
    registry.redis.lpush(lanes_by_priority()[0], "x")
    registry.redis.lpush(lanes_by_priority()[9], "x", "y")
    registry.redis.zadd(registry.keys.dead, {"j/0": 1})
    registry.redis.hincrby(registry.keys.admission, "frames", 3)
    reading = _read(registry)
    assert reading.messages == {0: 1, 3: 0, 6: 0, 9: 2}
    assert (reading.num_dead_units, reading.num_dead_frames) == (1, 3)


def test_a_shard_whose_job_is_gone_does_no_harm(registry: TestRegistry) -> None:
    job_id = _job(registry, "a", 2)
    registry.redis.delete(registry.keys.job(job_id))
    [backlog] = _read(registry).backlogs
    assert backlog.waiting == {}


def test_a_look_changes_nothing(registry: TestRegistry) -> None:
    _job(registry, "a", 2)
    registry.redis.zadd(registry.keys.queued, {"a tenant without shards": 1})

    def everything() -> dict[str, bytes | None]:
        return {text(key): registry.redis.dump(key) for key in registry.redis.keys("*")}

    before = everything()
    _read(registry)
    assert everything() == before
