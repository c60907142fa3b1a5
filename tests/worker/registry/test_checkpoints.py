from __future__ import annotations

import time

from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptCheckpoint, PromptRecord, UnitLeases
from worker.registry.lifecycle import Outcome, PutStatus

LINE = b'{"prompt": "a"}'


def _claim(registry: TestRegistry, leases: UnitLeases, count: int = 3) -> Claim:
    return must_claim(leases, UnitRef.shard(registry.running_job(range(count)), 0))


def _kept(leases: UnitLeases, claim: Claim, count: int = 3) -> list[bytes | None]:
    found = leases.lines_and_checkpoints(claim.ref.job_id, range(count))
    assert [line for line, _ in found] == [LINE] * count
    return [checkpoint for _, checkpoint in found]


def test_the_last_checkpoint_of_a_prompt_is_kept(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    assert _kept(leases, claim) == [None, None, None]
    assert leases.checkpoint(claim, [PromptCheckpoint(0, "a"), PromptCheckpoint(2, "b")])
    assert leases.checkpoint(claim, [PromptCheckpoint(2, "c")])
    assert _kept(leases, claim) == [b"a", None, b"c"]


def test_who_takes_the_unit_over_finds_them_and_who_lost_it_writes_none(registry: TestRegistry) -> None:
    leases = registry.leases(lease_s=0.05)
    first = _claim(registry, leases)
    assert leases.checkpoint(first, [PromptCheckpoint(0, "old")])
    time.sleep(0.06)
    assert leases.checkpoint(first, [PromptCheckpoint(0, "late")])  # nobody took it yet
    second = must_claim(leases, first.ref, alone=True)
    assert not leases.checkpoint(first, [PromptCheckpoint(0, "fenced")])
    assert _kept(leases, second) == [b"late", None, None]
    assert leases.checkpoint(second, [PromptCheckpoint(0, "new")])
    leases.release(second, count_attempt=False)
    assert not leases.checkpoint(second, [PromptCheckpoint(0, "released")])
    assert _kept(leases, second) == [b"new", None, None]


def test_a_record_takes_its_checkpoint_away_and_none_comes_after_it(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    leases.checkpoint(claim, [PromptCheckpoint(0, "a"), PromptCheckpoint(1, "b")])
    leases.put(claim, [ok(0)])
    assert leases.checkpoint(claim, [PromptCheckpoint(0, "again"), PromptCheckpoint(2, "c")])
    assert _kept(leases, claim) == [None, b"b", b"c"]


def test_a_job_that_ended_keeps_no_checkpoints(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    key = registry.keys.checkpoints(claim.ref.job_id)
    leases.checkpoint(claim, [PromptCheckpoint(index, "a") for index in range(3)])
    assert registry.redis.ttl(key) == -1
    assert leases.put(claim, [ok(0), PromptRecord(1, Outcome.CANCELLED, "{}")])[0] is PutStatus.OPEN
    assert leases.put(claim, [PromptRecord(2, Outcome.ERROR, "{}")])[0] is PutStatus.JOB_DONE
    assert not registry.redis.exists(key)
    assert not leases.checkpoint(claim, [PromptCheckpoint(2, "late")])
    assert not registry.redis.exists(key)


def test_checkpoints_are_no_outstanding_work(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    before = registry.redis.hgetall(registry.keys.admission)
    leases.checkpoint(claim, [PromptCheckpoint(0, "a" * 1000)])
    assert registry.redis.hgetall(registry.keys.admission) == before
