"""Leases of units, and the resume states that are kept under them."""

from __future__ import annotations

from collections.abc import Collection

import pytest

from tests.support.redis_servers import lose_next_script_reply
from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.errors import JobNotFound
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, NewShard, PromptRecord, PromptResumeState, UnitLeases
from worker.registry.lifecycle import ClaimRefusal, Outcome, PutStatus, RunMode
from worker.schemas import JobState, SubmitOptions

LINE = b'{"prompt": "a"}'


def test_a_second_claim_of_a_live_lease_is_busy(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0, 1]), 0)
    claim = must_claim(registry.leases(), shard)
    assert (claim.mode, claim.attempts, claim.missing) == (RunMode.RUN, 0, (0, 1))
    assert registry.leases(owner="other").claim(shard) is ClaimRefusal.BUSY


def test_an_unknown_job_is_gone_and_a_planned_plan_is_finished(registry: TestRegistry) -> None:
    leases = registry.leases()
    assert leases.claim(UnitRef.plan(registry.keys.new_job_id())) is ClaimRefusal.GONE
    assert leases.claim(UnitRef.plan(registry.running_job([0]))) is ClaimRefusal.TERMINAL


def test_a_shard_keeps_its_order_and_gives_only_what_is_missing(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([2, 0, 1], [3]), 0)
    leases.put(must_claim(leases, shard), [ok(0)])
    registry.lapse(shard)
    second = must_claim(leases, shard, alone=True)
    assert second.missing == (2, 1)
    assert second.attempts == 1


def test_a_fenced_owner_writes_nothing(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1])
    first = must_claim(leases, UnitRef.shard(job_id, 0))
    registry.lapse(first.ref)
    second = must_claim(leases, first.ref, alone=True)
    assert int(second.token.split(":")[0]) == int(first.token.split(":")[0]) + 1
    assert leases.put(first, [ok(0)])[0] is PutStatus.FENCED
    assert leases.renew([first])[0][0] is PutStatus.FENCED
    assert not leases.release(first, count_attempt=False)
    assert registry.status(job_id).request_counts.finished == 0
    assert leases.put(second, [ok(0)])[0] is PutStatus.OPEN


def test_a_lapsed_lease_that_nobody_took_may_still_write(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0, 1]), 0))
    registry.lapse(claim.ref)
    assert leases.put(claim, [ok(0)])[0] is PutStatus.OPEN


def test_renewal_keeps_a_lease(registry: TestRegistry) -> None:
    leases = registry.leases(lease_s=30.0)
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0]), 0))
    for _ in range(3):
        registry.let_pass(claim.ref, 15.0)
        assert leases.renew([claim]) == [(PutStatus.OPEN, RunMode.RUN, None)]
    assert leases.claim(claim.ref) is ClaimRefusal.BUSY


def test_a_record_is_written_once_and_counted_once(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1])
    claim = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(claim, [ok(1, '"first"')])
    leases.put(claim, [ok(1, '"second"'), PromptRecord(1, Outcome.ERROR, '"third"')])
    assert registry.records(job_id) == [b'"first"']
    job = registry.status(job_id)
    assert (job.request_counts.completed, job.request_counts.failed) == (1, 0)
    assert (job.usage.input_tokens, job.usage.cached_tokens, job.usage.output_tokens) == (5, 2, 3)


def test_tokens_are_summed_by_kind(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1, 2])
    kinds = {"prompt_tokens": 7, "cached_tokens": 5, "output_tokens": 9, "resumed_tokens": 2, "reasoning_tokens": 4}
    records = [PromptRecord(index, Outcome.OK, "{}", **kinds) for index in (0, 1)]
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), records)
    usage = registry.status(job_id).usage
    assert (usage.input_tokens, usage.cached_tokens, usage.output_tokens, usage.total_tokens) == (14, 10, 18, 32)
    assert (usage.resumed_tokens, usage.reasoning_tokens) == (4, 8)


def test_a_job_finishes_with_its_last_record_and_then_everything_expires(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1], [2], options=SubmitOptions(tenant="acme", idempotency_key="k"))
    first, second = (must_claim(leases, UnitRef.shard(job_id, number)) for number in (0, 1))
    assert leases.put(second, [ok(2)])[0] is PutStatus.UNIT_DONE
    assert leases.put(first, [ok(1)])[0] is PutStatus.OPEN
    assert registry.status(job_id).status is JobState.IN_PROGRESS
    assert leases.put(first, [ok(0)])[0] is PutStatus.JOB_DONE
    job = registry.status(job_id)
    assert (job.status, job.shards_done, job.request_counts.completed) == (JobState.COMPLETED, 2, 3)
    assert job.results_expire_at == pytest.approx((job.finished_at or 0) + 86_400)
    keys = registry.keys
    for key in (keys.job(job_id), keys.records(job_id), keys.order(job_id), keys.idempotency("acme", "k")):
        assert 0 < registry.redis.ttl(key) <= 86_400
    assert not registry.redis.exists(keys.lines(job_id), keys.unit(first.ref), keys.tenant_counters("acme"))
    assert registry.redis.zcard(keys.open) == 0
    counters = registry.redis.hgetall(keys.counters)
    assert [counters[name] for name in (b"prompts", b"bytes", b"jobs", b"total")] == [b"0", b"0", b"0", b"3"]


def test_a_release_costs_no_attempt_unless_it_says_so(registry: TestRegistry) -> None:
    leases = registry.leases()
    shard = UnitRef.shard(registry.running_job([0]), 0)
    assert leases.release(must_claim(leases, shard), count_attempt=False)
    assert leases.release(must_claim(leases, shard), count_attempt=True)
    assert must_claim(leases, shard, alone=True).attempts == 1


def test_a_plan_that_crashed_too_many_workers_fails_its_job(registry: TestRegistry) -> None:
    leases = registry.leases(max_attempts=1)
    job_id = registry.submit([b"x"])
    must_claim(leases, UnitRef.plan(job_id))
    registry.lapse(UnitRef.plan(job_id))
    lost = must_claim(leases, UnitRef.plan(job_id))
    assert lost.mode is RunMode.LOST
    leases.put(lost, [PromptRecord(0, Outcome.LOST, "{}")])
    job = registry.status(job_id)
    assert job.status is JobState.FAILED
    assert job.error is not None


def test_a_cancelled_job_tells_its_owner_and_ends_cancelled(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1], [2])
    running = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(running, [ok(0)])
    units = registry.control.cancel(job_id)
    assert [unit.unit for unit in units] == ["plan", "0", "1"]
    assert registry.status(job_id).status is JobState.CANCELLING
    assert leases.cancelled([job_id, registry.keys.new_job_id()]) == {job_id}
    assert leases.renew([running])[0][1] is RunMode.CANCELLED
    queued = must_claim(leases, units[2])
    assert queued.mode is RunMode.CANCELLED
    leases.put(queued, [PromptRecord(2, Outcome.CANCELLED, "{}")])
    assert leases.put(running, [PromptRecord(1, Outcome.CANCELLED, "{}")])[0] is PutStatus.JOB_DONE
    job = registry.status(job_id)
    counts = job.request_counts
    assert (job.status, counts.completed, counts.failed) == (JobState.CANCELLED, 1, 2)
    assert (counts.cancelled, counts.faulty) == (2, 0)


def test_cancelling_is_idempotent_and_leaves_finished_jobs_alone(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0])
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0)])
    assert registry.control.cancel(job_id) == []
    assert registry.status(job_id).status is JobState.COMPLETED
    with pytest.raises(JobNotFound):
        registry.control.cancel(registry.keys.new_job_id())


def test_a_job_past_its_deadline_expires(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0, 1], [2], options=SubmitOptions(deadline_s=60))
    running = must_claim(leases, UnitRef.shard(job_id, 0))
    assert running.time_left_s is not None
    assert 0 < running.time_left_s <= 60
    registry.expire(job_id)
    assert leases.put(running, [ok(0)]) == (PutStatus.OPEN, RunMode.EXPIRED)
    late = must_claim(leases, UnitRef.shard(job_id, 1))
    assert late.mode is RunMode.EXPIRED
    leases.put(late, [PromptRecord(2, Outcome.EXPIRED, "{}")])
    leases.put(running, [PromptRecord(1, Outcome.EXPIRED, "{}")])
    job = registry.status(job_id)
    assert (job.status, job.request_counts.failed, job.request_counts.expired) == (JobState.EXPIRED, 2, 2)


def test_a_job_with_every_answer_is_completed_though_past_its_deadline(registry: TestRegistry) -> None:
    leases = registry.leases()
    job_id = registry.running_job([0], options=SubmitOptions(deadline_s=60))
    running = must_claim(leases, UnitRef.shard(job_id, 0))
    registry.expire(job_id)
    leases.put(running, [ok(0)])
    assert registry.status(job_id).status is JobState.COMPLETED


def test_scripts_survive_a_script_flush(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0, 1]), 0))
    registry.redis.script_flush()
    assert leases.renew([claim])[0][0] is PutStatus.OPEN
    registry.redis.script_flush()
    assert leases.put(claim, [ok(0)])[0] is PutStatus.OPEN


@pytest.mark.parametrize("lease_s", [30.0, 0.001])
def test_a_claim_whose_reply_is_lost_is_the_same_claim(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch, lease_s: float
) -> None:
    leases = registry.leases(lease_s=lease_s)
    shard = UnitRef.shard(registry.running_job([1, 0], [2]), 0)
    must_claim(leases, UnitRef.shard(shard.job_id, 1))  # Redis knows the script now
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    claim = must_claim(leases, shard)
    assert lost
    assert (claim.token.split(":")[0], claim.attempts, claim.missing) == ("1", 0, (1, 0))
    assert leases.renew([claim])[0][0] is PutStatus.OPEN


def test_a_plan_whose_reply_is_lost_is_planned(registry: TestRegistry, monkeypatch: pytest.MonkeyPatch) -> None:
    leases = registry.leases()
    registry.running_job([0])  # Redis knows the script now
    plan = must_claim(leases, UnitRef.plan(registry.submit([b"x"])))
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    assert leases.planned(plan, [NewShard([0])], ageing_s=60.0) is PutStatus.UNIT_DONE
    assert lost
    assert must_claim(leases, UnitRef.shard(plan.ref.job_id, 0)).missing == (0,)
    other = must_claim(leases, UnitRef.plan(registry.submit([b"x"])))
    leases.release(other, count_attempt=False)
    assert leases.planned(other, [NewShard([0])], ageing_s=60.0) is PutStatus.FENCED


def _claim(registry: TestRegistry, leases: UnitLeases, count: int = 3) -> Claim:
    return must_claim(leases, UnitRef.shard(registry.running_job(range(count)), 0))


def _kept(leases: UnitLeases, claim: Claim, answered: Collection[int] = ()) -> list[bytes | None]:
    found = leases.lines_and_resume_states(claim.ref.job_id, range(3))
    assert [line for line, _ in found] == [None if index in answered else LINE for index in range(3)]
    return [resume_state for _, resume_state in found]


def test_the_last_resume_state_of_a_prompt_is_kept(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    assert _kept(leases, claim) == [None, None, None]
    assert leases.put_resume_states(claim, [PromptResumeState(0, "a"), PromptResumeState(2, "b")])
    assert leases.put_resume_states(claim, [PromptResumeState(2, "c")])
    assert _kept(leases, claim) == [b"a", None, b"c"]


def test_who_takes_the_unit_over_finds_them_and_who_lost_it_writes_none(registry: TestRegistry) -> None:
    leases = registry.leases()
    first = _claim(registry, leases)
    assert leases.put_resume_states(first, [PromptResumeState(0, "old")])
    registry.lapse(first.ref)
    assert leases.put_resume_states(first, [PromptResumeState(0, "late")])  # nobody took it yet
    second = must_claim(leases, first.ref, alone=True)
    assert not leases.put_resume_states(first, [PromptResumeState(0, "fenced")])
    assert _kept(leases, second) == [b"late", None, None]
    assert leases.put_resume_states(second, [PromptResumeState(0, "new")])
    leases.release(second, count_attempt=False)
    assert not leases.put_resume_states(second, [PromptResumeState(0, "released")])
    assert _kept(leases, second) == [b"new", None, None]


def test_a_record_takes_its_resume_state_away_and_none_comes_after_it(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    leases.put_resume_states(claim, [PromptResumeState(0, "a"), PromptResumeState(1, "b")])
    leases.put(claim, [ok(0)])
    assert leases.put_resume_states(claim, [PromptResumeState(0, "again"), PromptResumeState(2, "c")])
    assert _kept(leases, claim, answered=[0]) == [None, b"b", b"c"]


def test_a_job_that_ended_keeps_no_resume_states(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    key = registry.keys.resume_states(claim.ref.job_id)
    leases.put_resume_states(claim, [PromptResumeState(index, "a") for index in range(3)])
    assert registry.redis.ttl(key) == -1
    assert leases.put(claim, [ok(0), PromptRecord(1, Outcome.CANCELLED, "{}")])[0] is PutStatus.OPEN
    assert leases.put(claim, [PromptRecord(2, Outcome.ERROR, "{}")])[0] is PutStatus.JOB_DONE
    assert not registry.redis.exists(key)
    assert not leases.put_resume_states(claim, [PromptResumeState(2, "late")])
    assert not registry.redis.exists(key)


def test_resume_states_are_no_outstanding_work(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = _claim(registry, leases)
    before = registry.redis.hgetall(registry.keys.counters)
    leases.put_resume_states(claim, [PromptResumeState(0, "a" * 1000)])
    assert registry.redis.hgetall(registry.keys.counters) == before
