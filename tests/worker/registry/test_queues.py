"""Which queued shard a worker is given, and what one look at the queue tells."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry import queues as queue_figures
from worker.registry.exchange import text
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, NewShard, PromptRecord
from worker.registry.lifecycle import ClaimRefusal, Outcome, PutStatus
from worker.registry.queues import QueueFigures, QueueReading, lanes_by_priority
from worker.schemas import SubmitOptions

AGEING_S = 60.0


def _job(
    registry: TestRegistry, heads: Sequence[str], *, tenant: str = "t", priority: int = 5, prompts: int = 1
) -> list[UnitRef]:
    """A planned job of shards that begin like this; its shards."""
    indices = [range(n * prompts, (n + 1) * prompts) for n in range(len(heads))]
    lines = [b'{"prompt": "a"}'] * (prompts * len(heads))
    job_id = registry.submit(lines, SubmitOptions(tenant=tenant, priority=priority))
    leases = registry.leases()
    shards = [NewShard(part, head, "fake") for part, head in zip(indices, heads, strict=True)]
    assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), shards, ageing_s=AGEING_S) is PutStatus.UNIT_DONE
    planned_at_s = registry.time_s()
    while registry.time_s() - planned_at_s < 0.001:
        pass  # Redis tells turns apart by the millisecond
    return [UnitRef.shard(job_id, number) for number in range(len(heads))]


class Worker:
    """Claims what it is given, always on the same message."""

    def __init__(self, registry: TestRegistry, hint: UnitRef) -> None:
        self.registry = registry
        self.hint = hint
        self.held: list[Claim] = []

    def choose(self, *, only_new_tenants: bool = False) -> UnitRef | None:
        return self.registry.shard_queue().choose(self.hint, self.held, only_new_tenants=only_new_tenants)

    def claim(self, count: int) -> list[UnitRef]:
        """The shards that the worker gets, one after the other."""
        for _ in range(count):
            ref = self.choose()
            assert ref is not None
            self.held.append(must_claim(self.registry.leases(), ref))
        return [claim.ref for claim in self.held[-count:]]


def test_tenants_take_turns_however_many_shards_one_has_queued_before(registry: TestRegistry) -> None:
    large = _job(registry, ["a", "b", "c", "d", "e"], tenant="large")
    small, other = _job(registry, ["a", "b"], tenant="small"), _job(registry, ["a"], tenant="other")
    worker = Worker(registry, large[0])
    assert worker.claim(8) == [large[0], small[0], other[0], large[1], small[1], large[2], large[3], large[4]]


def test_a_tenant_of_small_shards_gets_more_of_them(registry: TestRegistry) -> None:
    long, short = _job(registry, ["a", "b"], tenant="x", prompts=3), _job(registry, ["a"] * 4, tenant="y")
    worker = Worker(registry, long[0])
    assert [ref.job_id for ref in worker.claim(6)] == [
        shard.job_id for shard in [long[0], *short[:3], long[1], short[3]]
    ]


def test_a_tenants_shards_are_taken_in_prefix_order_and_round_again(registry: TestRegistry) -> None:
    first, second = _job(registry, ["b", "d", "f"]), _job(registry, ["a", "c", "d"])
    worker = Worker(registry, first[2])
    assert worker.claim(3) == [second[0], first[0], second[1]]
    later = _job(registry, ["b"])
    assert set(worker.claim(2)) == {first[1], second[2]}
    assert worker.claim(2) == [first[2], later[0]]


def test_a_better_priority_comes_first_unless_the_other_waited_longer(registry: TestRegistry) -> None:
    patient, urgent = _job(registry, ["a"], priority=5), _job(registry, ["z"], priority=3)
    worker = Worker(registry, patient[0])
    assert worker.choose() == urgent[0]
    _age(registry, patient[0], 3 * AGEING_S + 1)
    assert worker.choose() == patient[0]


def _age(registry: TestRegistry, ref: UnitRef, seconds: float) -> None:
    key = f"{registry.keys.queued}:t@fake"
    registry.redis.zincrby(key, -seconds * 1000, str(ref))


def test_slots_that_are_kept_are_for_tenants_that_have_nothing_here(registry: TestRegistry) -> None:
    large = _job(registry, ["a", "b"], tenant="large")
    worker = Worker(registry, large[1])
    assert worker.claim(1) == [large[0]]
    assert worker.choose(only_new_tenants=True) is None
    small = _job(registry, ["a"], tenant="small", priority=9)
    assert worker.choose(only_new_tenants=True) == small[0]


def test_a_shard_given_back_is_queued_again_and_one_that_ends_is_gone(registry: TestRegistry) -> None:
    [shard] = _job(registry, ["a"])
    worker = Worker(registry, UnitRef.shard(shard.job_id, 7))
    worker.claim(1)
    assert worker.choose() == worker.hint  # nothing is queued
    assert registry.leases().release(worker.held[0], count_attempt=False)
    assert worker.claim(1) == [shard]
    registry.leases().put(worker.held[-1], [ok(0)])
    assert not list(registry.redis.scan_iter(f"{registry.keys.queued}*"))


def test_a_suspect_and_its_parts_are_claimed_on_their_own_messages_alone(registry: TestRegistry) -> None:
    [shard] = _job(registry, ["a"], prompts=2)
    leases = registry.leases()
    registry.leases().release(must_claim(leases, shard), count_attempt=True)
    [healthy] = _job(registry, ["b"])
    assert Worker(registry, shard).choose() == shard
    assert Worker(registry, healthy).choose() == healthy  # though the suspect was there first
    assert leases.claim(shard) is ClaimRefusal.SUSPECT
    alone = must_claim(leases, shard, alone=True)
    leases.begin_alone(alone)
    leases.release(alone, count_attempt=True)
    assert leases.claim(shard) is ClaimRefusal.SPLIT
    part = UnitRef.shard(shard.job_id, 1)
    assert Worker(registry, part).choose() == part
    assert Worker(registry, healthy).choose() == healthy


def test_a_shard_that_is_not_queued_is_claimed_on_its_own_message(registry: TestRegistry) -> None:
    older, queued = _job(registry, ["b", "a"], tenant="x")
    assert registry.redis.zrem(f"{registry.keys.queued}:x@fake", str(older)) == 1  # as an older worker's plan left it
    assert Worker(registry, older).choose() == older
    assert Worker(registry, queued).choose() == queued


def test_a_shard_whose_worker_died_is_claimed_on_its_own_message(registry: TestRegistry) -> None:
    dead, queued = _job(registry, ["b", "a"])
    must_claim(registry.leases(), dead)
    registry.lapse(dead)
    assert Worker(registry, dead).choose() == dead
    assert Worker(registry, queued).choose() == queued


def test_a_shard_its_holder_lost_is_found_although_the_clock_went_back(registry: TestRegistry) -> None:
    lost, _ = _job(registry, ["b", "a"])
    must_claim(registry.leases(), lost)
    lease = round(registry.time_s() * 1000) + 24 * 3600 * 1000
    registry.redis.hset(registry.keys.unit(lost), mapping={"lease": lease, "judged": f"{lease} alive"})
    assert Worker(registry, lost).choose() == lost


def test_names_of_shards_that_are_no_more_are_dropped(registry: TestRegistry) -> None:
    [shard] = _job(registry, ["a"])
    registry.redis.delete(registry.keys.unit(shard))
    other = UnitRef.shard(shard.job_id, 5)
    worker = Worker(registry, other)
    assert worker.choose() == other
    assert worker.choose() == other
    assert not list(registry.redis.scan_iter(f"{registry.keys.queued}*"))


def _read(registry: TestRegistry, max_tenants: int = 20) -> QueueReading:
    return QueueFigures(registry.directory(), registry.keys, max_tenants=max_tenants).read()


def _job_of_shards(registry: TestRegistry, tenant: str, num_shards: int, *, priority: int = 5) -> str:
    """A planned job with one line a shard."""
    return registry.running_job(
        *([number] for number in range(num_shards)), options=SubmitOptions(tenant=tenant, priority=priority)
    )


def _age_shards(registry: TestRegistry, job_id: str, numbers: Sequence[int], seconds: int) -> None:
    """Make shards look as if queued so long ago."""
    for number in numbers:
        ref = UnitRef.shard(job_id, number)
        tenant = registry.status(job_id).tenant
        registry.redis.hincrby(registry.keys.unit(ref), "first", -1000 * seconds)
        registry.redis.zincrby(f"{registry.keys.queued}:{tenant}@fake", -1000 * seconds, str(ref))


def test_an_empty_redis_has_an_empty_queue(registry: TestRegistry) -> None:
    reading = _read(registry)
    assert (reading.open_jobs, reading.open_units, reading.overdue_s, reading.num_records) == (0, 0, 0, 0)
    assert (reading.backlogs, reading.num_waiting_tenants) == ((), 0)
    assert reading.messages == {"": {0: 0, 3: 0, 6: 0, 9: 0}}
    assert reading.ended_jobs == {"completed": 0, "failed": 0, "cancelled": 0, "expired": 0}


def test_jobs_prompts_and_records_are_counted_for_all_time(registry: TestRegistry) -> None:
    leases = registry.leases()
    done, cancelled = _job_of_shards(registry, "a", 2), registry.submit([b'{"prompt": "a"}'] * 3)
    for number in range(2):
        leases.put(must_claim(leases, UnitRef.shard(done, number)), [ok(number)])
    open_job = _job_of_shards(registry, "a", 4)
    reading = _read(registry)
    assert (reading.submitted_jobs, reading.submitted_prompts, reading.num_records) == (3, 9, 2)
    assert (reading.open_jobs, reading.open_prompts, reading.open_units) == (2, 7, 5)
    assert reading.open_bytes == 7 * len(b'{"prompt": "a"}')
    assert reading.ended_jobs == {"completed": 1, "failed": 0, "cancelled": 0, "expired": 0}
    registry.control.cancel(cancelled)
    claim = must_claim(leases, UnitRef.plan(cancelled))
    leases.put(claim, [PromptRecord(index, Outcome.CANCELLED, "{}") for index in claim.missing])
    assert _read(registry).ended_jobs["cancelled"] == 1
    assert open_job in {job.id for job in registry.jobs()}


def test_waiting_shards_are_counted_and_aged_by_tenant_and_priority(
    registry: TestRegistry,
) -> None:
    first, urgent, other = (
        _job_of_shards(registry, "a", 3, priority=5),
        _job_of_shards(registry, "a", 2, priority=0),
        _job_of_shards(registry, "b", 1, priority=5),
    )
    _age_shards(registry, first, [0, 1, 2], 50)
    _age_shards(registry, first, [1], 40)
    _age_shards(registry, urgent, [1], 20)
    _age_shards(registry, other, [0], 7)
    by_tenant = {backlog.tenant: backlog for backlog in _read(registry).backlogs}
    assert {tenant: backlog.open_prompts for tenant, backlog in by_tenant.items()} == {"a": 5, "b": 1}
    found = {
        (tenant, priority): (count, round(oldest_s))
        for tenant, backlog in by_tenant.items()
        for priority, (count, oldest_s) in backlog.waiting.items()
    }
    assert found == {("a", 5): (3, 90), ("a", 0): (2, 20), ("b", 5): (1, 7)}


def test_a_shard_that_somebody_holds_does_not_wait(registry: TestRegistry) -> None:
    job_id = _job_of_shards(registry, "a", 2)
    must_claim(registry.leases(), UnitRef.shard(job_id, 0))
    [backlog] = _read(registry).backlogs
    assert (backlog.open_prompts, [count for count, _ in backlog.waiting.values()]) == (2, [1])


def test_only_the_tenants_with_the_longest_queues_are_told_apart(registry: TestRegistry) -> None:
    for tenant, num_shards in (("a", 1), ("b", 4), ("c", 3), ("d", 2)):
        _job_of_shards(registry, tenant, num_shards)
    reading = _read(registry, max_tenants=2)
    assert {backlog.tenant for backlog in reading.backlogs} == {"b", "c"}
    assert (reading.num_waiting_tenants, reading.other_waiting_shards) == (4, {"fake": 1 + 2})


def test_a_look_keeps_to_its_budget_and_serves_small_queues_first(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(queue_figures, "MAX_SHARDS", 10)
    for tenant, num_shards in (("a", 30), ("b", 2), ("c", 12)):
        _job_of_shards(registry, tenant, num_shards)
    backlogs = {backlog.tenant: backlog for backlog in _read(registry).backlogs}
    read = {tenant: sum(count for count, _ in item.waiting.values()) for tenant, item in backlogs.items()}
    assert read == {"b": 2, "c": 4, "a": 4}
    assert {tenant: item.num_unread for tenant, item in backlogs.items()} == {"b": 0, "c": 8, "a": 26}


def test_a_unit_that_nobody_looks_at_becomes_overdue(registry: TestRegistry) -> None:
    job_id = _job_of_shards(registry, "a", 1)
    registry.redis.zincrby(registry.keys.open, -100_000, f"{job_id}/0")
    assert 60 < _read(registry).overdue_s < 100  # it was due in 30 s


def test_messages_dead_units_and_dead_frames_are_counted(registry: TestRegistry) -> None:
    registry.redis.lpush(lanes_by_priority()[0], "x")
    registry.redis.lpush(lanes_by_priority()[9], "x", "y")
    registry.redis.zadd(registry.keys.dead, {"j/0": 1})
    registry.redis.hincrby(registry.keys.counters, "frames", 3)
    reading = _read(registry)
    assert reading.messages == {"": {0: 1, 3: 0, 6: 0, 9: 2}}
    assert (reading.num_dead_units, reading.num_dead_frames) == (1, 3)


def test_a_shard_whose_job_is_gone_does_no_harm(registry: TestRegistry) -> None:
    job_id = _job_of_shards(registry, "a", 2)
    registry.redis.delete(registry.keys.job(job_id))
    [backlog] = _read(registry).backlogs
    assert backlog.waiting == {}


def test_a_look_changes_nothing(registry: TestRegistry) -> None:
    _job_of_shards(registry, "a", 2)
    registry.redis.zadd(registry.keys.queued, {"a tenant without shards": 1})

    def everything() -> dict[str, bytes | None]:
        return {text(key): registry.redis.dump(key) for key in registry.redis.keys("*")}

    before = everything()
    _read(registry)
    assert everything() == before
