"""Units that crashed a worker: run alone, split, lost."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import cast

import pytest

from tests.support.processes import wait_until
from tests.support.redis_servers import lose_next_script_reply
from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef
from worker.registry.leases import PromptRecord, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, Outcome, PutStatus, RunMode
from worker.schemas import JobState, SubmitOptions


def _crash(registry: TestRegistry, leases: UnitLeases, ref: UnitRef, *, alone: bool) -> None:
    claim = must_claim(leases, ref, alone=alone)
    if alone:
        assert leases.begin_alone(claim)
    registry.lapse(ref)


def _shards(registry: TestRegistry, job_id: str) -> dict[int, list[int]]:
    """The indices of each shard that is there."""
    found = {}
    for number in range(registry.status(job_id).shards_total):
        indices = cast("bytes | None", registry.redis.hget(registry.keys.unit(UnitRef.shard(job_id, number)), "idx"))
        if indices is not None:
            found[number] = [int(index) for index in indices.split(b",")]
    return found


def test_a_unit_that_crashed_a_worker_is_refused_unless_run_alone(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    assert not leases.is_suspect(shard)
    _crash(registry, leases, shard, alone=False)
    before = registry.redis.hgetall(registry.keys.unit(shard))
    assert leases.claim(shard) is ClaimRefusal.SUSPECT
    assert registry.redis.hgetall(registry.keys.unit(shard)) == before
    assert leases.is_suspect(shard)
    claim = must_claim(leases, shard, alone=True)
    assert (claim.mode, claim.attempts, claim.missing) == (RunMode.RUN, 1, (0, 1))
    assert not leases.is_suspect(shard)  # it has a lease


def test_crashes_in_company_make_nobody_guilty(registry: TestRegistry) -> None:
    leases = registry.leases(max_attempts=2)
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    registry.redis.hset(registry.keys.unit(shard), "att", 7)
    assert must_claim(leases, shard, alone=True).mode is RunMode.RUN


@pytest.mark.parametrize(
    ("num_prompts", "sizes"), [(256, [16] * 16), (40, [3] * 13 + [1]), (17, [2] * 8 + [1]), (16, [1] * 16), (2, [1, 1])]
)
def test_what_crashed_alone_is_split_into_at_most_sixteen_suspects(
    registry: TestRegistry, num_prompts: int, sizes: list[int]
) -> None:
    leases = registry.leases()
    order = [(7 * index) % num_prompts if num_prompts == 256 else index for index in range(num_prompts)]
    job_id = registry.running_job(order, [num_prompts])
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=False)
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=True)
    assert leases.claim(UnitRef.shard(job_id, 0)) is ClaimRefusal.SPLIT
    shards = _shards(registry, job_id)
    assert shards.pop(1) == [num_prompts]
    assert [len(indices) for indices in shards.values()] == sizes
    assert [index for number in sorted(shards) for index in shards[number]] == order
    assert list(shards) == list(range(2, 2 + len(sizes)))
    for number in shards:
        claim = must_claim(leases, UnitRef.shard(job_id, number), alone=True)
        assert (claim.attempts, claim.mode) == (1, RunMode.RUN)


def test_a_suspect_whose_claim_never_came_through_is_not_to_blame(registry: TestRegistry) -> None:
    leases = registry.leases(max_attempts=2)
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    _crash(registry, leases, shard, alone=False)
    must_claim(leases, shard, alone=True)  # and nothing more: the reply was lost for good
    registry.lapse(shard)
    assert must_claim(leases, shard, alone=True).attempts == 1
    registry.lapse(shard)
    claim = must_claim(leases, shard, alone=True)
    assert leases.begin_alone(claim)
    registry.lapse(shard)
    assert not leases.begin_alone(replace(claim, token="1:old"))
    assert leases.claim(shard) is ClaimRefusal.SPLIT


def test_innocents_are_lost_no_sooner_than_after_max_attempts_of_their_own(
    registry: TestRegistry,
) -> None:
    leases = registry.leases(max_attempts=3)
    job_id = registry.running_job(list(range(16)))
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=False)
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=True)
    leases.claim(UnitRef.shard(job_id, 0))
    part = UnitRef.shard(job_id, 1)
    _crash(registry, leases, part, alone=True)
    assert must_claim(leases, part, alone=True).mode is RunMode.RUN


def test_parts_are_announced_at_once_although_their_lane_is_full(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1], options=SubmitOptions(priority=7))
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=False)
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=True)
    leases.claim(UnitRef.shard(job_id, 0))
    registry.redis.lpush("millrace.fake\x06\x166", "a message")
    due = registry.reap_queue().due()
    assert [(unit.ref.unit, unit.priority) for unit in due] == [("1", 7), ("2", 7)]


def test_only_prompts_without_a_record_are_split_and_the_job_ends(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([3, 1, 0, 2])
    claim = must_claim(leases, UnitRef.shard(job_id, 0), alone=True)
    leases.begin_alone(claim)
    leases.put(claim, [ok(1)])
    registry.lapse(claim.ref)
    assert leases.claim(claim.ref) is ClaimRefusal.SPLIT
    assert leases.put(claim, [ok(3)])[0] is PutStatus.FENCED
    assert leases.renew([claim])[0][0] is PutStatus.FENCED
    assert _shards(registry, job_id) == {1: [3], 2: [0], 3: [2]}
    status = registry.status(job_id)
    assert (status.shards_total, status.shards_done) == (4, 1)
    for number, index in ((1, 3), (2, 0), (3, 2)):
        leases.put(must_claim(leases, UnitRef.shard(job_id, number), alone=True), [ok(index)])
    status = registry.status(job_id)
    assert (status.status, status.shards_total, status.shards_done) == (JobState.COMPLETED, 4, 4)
    assert registry.redis.zcard(registry.keys.open) == 0
    assert registry.redis.hget(registry.keys.counters, "prompts") == b"0"


def test_a_prompt_is_lost_after_max_attempts_and_tried_alone_before(registry: TestRegistry) -> None:
    leases = registry.leases(max_attempts=3)
    shard = UnitRef.shard(registry.running_job([0]), 0)
    _crash(registry, leases, shard, alone=False)
    _crash(registry, leases, shard, alone=True)
    assert leases.claim(shard) is ClaimRefusal.SUSPECT
    _crash(registry, leases, shard, alone=True)
    lost = must_claim(leases, shard)  # nothing is run: it need not be alone
    assert (lost.mode, lost.attempts) == (RunMode.LOST, 3)
    assert registry.redis.zscore(registry.keys.dead, str(shard)) is not None
    leases.put(lost, [PromptRecord(0, Outcome.LOST, "{}")])
    assert registry.status(shard.job_id).status is JobState.COMPLETED


def test_a_counted_release_makes_suspects_of_company_and_blames_one_alone(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    leases.release(must_claim(leases, shard), count_attempt=True)
    assert leases.claim(shard) is ClaimRefusal.SUSPECT
    leases.release(must_claim(leases, shard, alone=True), count_attempt=False)
    assert leases.claim(shard) is ClaimRefusal.SUSPECT
    claim = must_claim(leases, shard, alone=True)
    leases.begin_alone(claim)
    leases.release(claim, count_attempt=True)
    assert leases.claim(shard) is ClaimRefusal.SPLIT


def test_guilty_shards_of_a_cancelled_job_are_closed_whole(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1])
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=True)
    registry.control.cancel(job_id)
    claim = must_claim(leases, UnitRef.shard(job_id, 0))
    assert (claim.mode, claim.missing) == (RunMode.CANCELLED, (0, 1))


def test_a_plan_that_crashed_runs_alone_and_is_never_split(registry: TestRegistry) -> None:
    leases = registry.leases(max_attempts=3)
    plan = UnitRef.plan(registry.submit([b"x", b"y"]))
    _crash(registry, leases, plan, alone=False)
    assert leases.claim(plan) is ClaimRefusal.SUSPECT
    _crash(registry, leases, plan, alone=True)
    _crash(registry, leases, plan, alone=True)
    assert must_claim(leases, plan).mode is RunMode.LOST


def test_a_claim_alone_and_a_loss_survive_a_lost_reply(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases(max_attempts=3)
    shard = UnitRef.shard(registry.running_job([0]), 0)
    _crash(registry, leases, shard, alone=False)
    _crash(registry, leases, shard, alone=True)
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    claim = must_claim(leases, shard, alone=True)
    assert lost
    assert (claim.attempts, claim.mode) == (2, RunMode.RUN)
    leases.begin_alone(claim)
    registry.lapse(shard)
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    claim = must_claim(leases, shard)
    assert lost
    assert (claim.attempts, claim.mode) == (3, RunMode.LOST)


def test_a_split_whose_reply_is_lost_is_made_once(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1])
    _crash(registry, leases, UnitRef.shard(job_id, 0), alone=True)
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    assert leases.claim(UnitRef.shard(job_id, 0)) is ClaimRefusal.TERMINAL
    assert lost
    assert _shards(registry, job_id) == {1: [0], 2: [1]}


def test_without_memory_a_shard_is_split_as_a_whole(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1])
    shard = UnitRef.shard(job_id, 0)
    _crash(registry, leases, shard, alone=True)
    registry.redis.config_set("maxmemory", 1)
    try:
        assert leases.claim(shard) is ClaimRefusal.SPLIT
    finally:
        registry.redis.config_set("maxmemory", 0)
    assert _shards(registry, job_id) == {1: [0], 2: [1]}


def _lapsed(registry: TestRegistry, *, of: str = "holder") -> UnitRef:
    """A shard whose lease has run out, and nobody has looked."""
    registry.serve("fake", of)
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    must_claim(registry.leases(owner=of), shard)
    time.sleep(0.002)  # the holder has announced itself before
    registry.redis.hset(registry.keys.unit(shard), "lease", int(registry.time_s() * 1000))  # never a moment ahead
    registry.make_due()
    return shard


def _announced(registry: TestRegistry, patience_s: float) -> list[UnitRef]:
    return [due.ref for due in registry.reap_queue(patience_s=patience_s).due()]


def test_the_unit_of_a_holder_that_is_silent_is_a_suspect_after_a_while(registry: TestRegistry) -> None:
    shard, began_s = _lapsed(registry), time.monotonic()
    assert registry.leases().claim(shard) is ClaimRefusal.BUSY
    assert not registry.leases().is_suspect(shard)
    wait_until(lambda: _announced(registry, 0.2) == [shard])
    assert time.monotonic() - began_s >= 0.2
    assert registry.leases().is_suspect(shard)
    assert registry.leases().claim(shard) is ClaimRefusal.SUSPECT


def test_the_unit_of_a_holder_that_still_announces_itself_is_no_suspect(registry: TestRegistry) -> None:
    shard = _lapsed(registry)
    assert _announced(registry, 1000) == []
    registry.serve("fake", "holder")
    registry.make_due()
    assert _announced(registry, 1000) == [shard]
    assert not registry.leases().is_suspect(shard)
    assert must_claim(registry.leases(), shard).attempts == 0


def _looks_after_hours(registry: TestRegistry, shard: UnitRef, *, num_looks: int) -> int:
    """Look so many times, with an hour between two; how many ms of silence were counted."""
    silence = b""
    for _ in range(num_looks):
        registry.make_due()
        assert _announced(registry, 1000) == []
        lease, began, last, silence = cast(bytes, registry.redis.hget(registry.keys.unit(shard), "doubt")).split()
        an_hour_ago = int(last) - 3_600_000
        registry.redis.hset(registry.keys.unit(shard), "doubt", b"%s %s %d %s" % (lease, began, an_hour_ago, silence))
    return int(silence)


def test_the_time_in_which_nobody_looked_is_no_silence(registry: TestRegistry) -> None:
    shard = _lapsed(registry)  # and Redis was away between the looks
    assert _looks_after_hours(registry, shard, num_looks=3) == 2 * 250_000


def test_a_holder_silent_for_half_its_lease_is_judged_when_it_ends(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    must_claim(registry.leases(owner="holder"), shard)
    registry.let_pass(shard, 20.0)
    assert _looks_after_hours(registry, shard, num_looks=5) == 4 * 250_000
    assert registry.leases().claim(shard) is ClaimRefusal.BUSY
    doubt = cast(bytes, registry.redis.hget(registry.keys.unit(shard), "doubt")).split()
    ended = b"%d" % (registry.time_s() * 1000)
    registry.redis.hset(registry.keys.unit(shard), mapping={"lease": ended, "doubt": b" ".join([ended, *doubt[1:]])})
    registry.make_due()
    assert _announced(registry, 1000) == [shard]
    assert registry.leases().claim(shard) is ClaimRefusal.SUSPECT


def test_a_holder_that_announces_itself_under_its_lease_is_not_silent(registry: TestRegistry) -> None:
    registry.serve("fake", "holder")
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    must_claim(registry.leases(owner="holder"), shard)
    registry.let_pass(shard, 20.0)
    assert _looks_after_hours(registry, shard, num_looks=3) == 2 * 250_000
    registry.serve("fake", "holder")
    assert _looks_after_hours(registry, shard, num_looks=1) == 0


def test_a_lease_is_not_looked_at_before_half_of_it_is_over(registry: TestRegistry) -> None:
    shard, leases = UnitRef.shard(registry.running_job([0, 1]), 0), registry.leases(owner="holder")
    claim = must_claim(leases, shard)
    looks_s = [_next_look_s(registry, shard)]
    leases.renew([claim])
    looks_s.append(_next_look_s(registry, shard))
    registry.make_due()
    assert _announced(registry, 1000) == []
    looks_s.append(_next_look_s(registry, shard))
    assert registry.redis.hget(registry.keys.unit(shard), "doubt") is None
    assert looks_s == [pytest.approx(15.0)] * 3  # before the end of 30 s


def _next_look_s(registry: TestRegistry, shard: UnitRef) -> float:
    """How long before the end of the shard's lease the reapers look."""
    score = registry.redis.zscore(registry.keys.open, str(shard))
    assert score is not None
    return float(cast(bytes, registry.redis.hget(registry.keys.unit(shard), "lease"))) / 1000 - score / 1000


def test_a_holder_that_comes_back_in_time_goes_on(registry: TestRegistry) -> None:
    registry.serve("fake", "holder")
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    leases = registry.leases(owner="holder")
    claim = must_claim(leases, shard)
    registry.redis.hset(registry.keys.unit(shard), "lease", 1)
    registry.make_due()
    registry.redis.delete(registry.keys.served)
    assert _announced(registry, 1000) == []
    assert leases.renew([claim])[0][0] is PutStatus.OPEN
    registry.redis.hset(registry.keys.unit(shard), "lease", 2)  # of this lease nothing is known yet
    registry.redis.delete(registry.keys.served)
    registry.make_due()
    assert _announced(registry, 0.01) == []
    assert leases.claim(shard) is ClaimRefusal.BUSY


def test_what_is_to_be_closed_waits_for_no_judgement(registry: TestRegistry) -> None:
    shard = _lapsed(registry)
    registry.control.cancel(shard.job_id)
    assert must_claim(registry.leases(models=()), shard).mode is RunMode.CANCELLED
