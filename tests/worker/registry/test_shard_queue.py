"""Which queued shard a worker is given, whatever message it came by."""

from __future__ import annotations

import time
from collections.abc import Sequence

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import ClaimRefusal
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
    assert leases.planned(must_claim(leases, UnitRef.plan(job_id)), indices, heads, ageing_s=AGEING_S)
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
        """The shards it got, one after the other."""
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


def test_shards_of_a_tenants_jobs_are_taken_in_prefix_order_and_round_again(registry: TestRegistry) -> None:
    first, second = _job(registry, ["b", "d", "f"]), _job(registry, ["a", "c", "d"])
    worker = Worker(registry, first[2])
    assert worker.claim(3) == [second[0], first[0], second[1]]
    later = _job(registry, ["b"])
    assert set(worker.claim(2)) == {first[1], second[2]}
    assert worker.claim(2) == [first[2], later[0]]


def test_a_better_priority_comes_first_unless_the_other_has_waited_as_much_longer(registry: TestRegistry) -> None:
    patient, urgent = _job(registry, ["a"], priority=5), _job(registry, ["z"], priority=3)
    worker = Worker(registry, patient[0])
    assert worker.choose() == urgent[0]
    _age(registry, patient[0], 3 * AGEING_S + 1)
    assert worker.choose() == patient[0]


def _age(registry: TestRegistry, ref: UnitRef, seconds: float) -> None:
    key = f"{registry.keys.queued}:t"
    registry.redis.zincrby(key, -seconds * 1000, str(ref))


def test_slots_that_are_kept_are_for_tenants_that_have_nothing_here(registry: TestRegistry) -> None:
    large = _job(registry, ["a", "b"], tenant="large")
    worker = Worker(registry, large[1])
    assert worker.claim(1) == [large[0]]
    assert worker.choose(only_new_tenants=True) is None
    small = _job(registry, ["a"], tenant="small", priority=9)
    assert worker.choose(only_new_tenants=True) == small[0]


def test_a_shard_is_queued_again_when_it_is_given_back_and_gone_when_it_ends(registry: TestRegistry) -> None:
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


def test_a_shard_that_is_not_among_the_queued_is_claimed_on_its_own_message(registry: TestRegistry) -> None:
    older, queued = _job(registry, ["b", "a"], tenant="x")
    assert registry.redis.zrem(f"{registry.keys.queued}:x", str(older)) == 1  # as an older worker's plan left it
    assert Worker(registry, older).choose() == older
    assert Worker(registry, queued).choose() == queued


def test_a_shard_whose_worker_died_is_claimed_on_its_own_message(registry: TestRegistry) -> None:
    dead, queued = _job(registry, ["b", "a"])
    must_claim(registry.leases(lease_s=0.05), dead)
    time.sleep(0.06)
    assert Worker(registry, dead).choose() == dead
    assert Worker(registry, queued).choose() == queued


def test_names_of_shards_that_are_no_more_are_dropped(registry: TestRegistry) -> None:
    [shard] = _job(registry, ["a"])
    registry.redis.delete(registry.keys.unit(shard))
    other = UnitRef.shard(shard.job_id, 5)
    worker = Worker(registry, other)
    assert worker.choose() == other
    assert worker.choose() == other
    assert not list(registry.redis.scan_iter(f"{registry.keys.queued}*"))
