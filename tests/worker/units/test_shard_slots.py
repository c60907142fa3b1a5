from __future__ import annotations

from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.runtime.held_units import HeldUnits
from worker.runtime.unit_runner import SLOTS_PER_RESERVED, ShardSlots
from worker.schemas import SubmitOptions


def _slots(registry: TestRegistry, held_units: HeldUnits, max_shards: int) -> ShardSlots:
    return ShardSlots(registry.shard_queue(), held_units, max_shards)


def test_one_tenant_never_has_the_last_slot(registry: TestRegistry) -> None:
    max_shards = SLOTS_PER_RESERVED
    large = registry.running_job(*[[n] for n in range(max_shards + 1)], options=SubmitOptions(tenant="large"))
    hint, held_units, leases = UnitRef.shard(large, 0), HeldUnits(), registry.leases()
    slots = _slots(registry, held_units, max_shards)
    for _ in range(max_shards - 1):
        chosen = slots.choose(hint)
        assert chosen is not None
        held_units.hold(must_claim(leases, chosen), message_id="m")
    assert slots.choose(hint) is None
    small = registry.running_job([0], options=SubmitOptions(tenant="small"))
    assert slots.choose(hint) == UnitRef.shard(small, 0)


def test_few_slots_are_for_whoever_comes(registry: TestRegistry) -> None:
    job = registry.running_job([0], [1])
    held_units = HeldUnits()
    slots = _slots(registry, held_units, 2)
    held_units.hold(must_claim(registry.leases(), UnitRef.shard(job, 0)), message_id="m")
    assert slots.choose(UnitRef.shard(job, 0)) == UnitRef.shard(job, 1)


def test_no_more_slots_are_taken_than_there_are(registry: TestRegistry) -> None:
    slots = _slots(registry, HeldUnits(), 1)
    assert slots.take(0.01)
    assert not slots.take(0.01)
    slots.give()
    assert slots.take(0.01)


def test_one_thread_chooses_at_a_time(registry: TestRegistry) -> None:
    slots = _slots(registry, HeldUnits(), 1)
    with slots.choosing(0.01) as first:
        with slots.choosing(0.01) as second:
            assert (first, second) == (True, False)
        with slots.choosing(0.01) as third:
            assert not third
    with slots.choosing(0.01) as later:
        assert later
