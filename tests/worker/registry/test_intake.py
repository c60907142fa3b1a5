"""How jobs come in: staging, quotas, and what is refused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from settings import LimitSettings
from tests.support.redis_servers import configured, lose_next_script_reply
from tests.support.registry import RecordingAnnouncer, TestRegistry, must_claim, ok
from worker.broker.messages import MessageEnd
from worker.registry.errors import EmptyJob, JobIncomplete, JobTooLarge, LinesChanged, QueueFull
from worker.registry.intake import JobIntake, LineDigest, Staged
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.registry.lifecycle import PutStatus
from worker.runtime.staged_jobs import StagedJobs
from worker.schemas import BatchError, JobState, SubmitOptions


def _submit(intake: JobIntake, registry: TestRegistry, num_lines: int, options: SubmitOptions | None = None) -> str:
    job_id = registry.keys.new_job_id()
    intake.stage(job_id, 0, [b"line"] * num_lines)
    intake.submit(job_id, num_lines, options or SubmitOptions())
    return job_id


def test_a_submitted_job_is_validating_and_keeps_its_lines(registry: TestRegistry) -> None:
    options = SubmitOptions(priority=2, deadline_s=60, tenant="acme", metadata={"run": "7"})
    job_id = registry.submit([b"one", b"\xfftwo"], options)
    job = registry.status(job_id)
    assert (job.status, job.request_counts.total, job.shards_total) == (JobState.VALIDATING, 2, 0)
    assert (job.priority, job.tenant, job.metadata) == (2, "acme", {"run": "7"})
    assert job.expires_at == pytest.approx(job.created_at + 60)
    assert registry.leases().lines(job_id, [1, 0]) == [b"\xfftwo", b"one"]
    assert registry.redis.ttl(registry.keys.lines(job_id)) == -1
    assert [listed.id for listed in registry.jobs(10)] == [job_id]


def test_staged_lines_expire_until_they_are_submitted(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    registry.intake().stage(job_id, 0, [b"line"])
    assert 3500 < registry.redis.ttl(registry.keys.lines(job_id)) <= 3600
    registry.intake().discard(job_id)
    assert not registry.redis.exists(registry.keys.lines(job_id))


def test_an_accepted_job_cannot_be_staged_discarded_or_submitted_again(registry: TestRegistry) -> None:
    intake = registry.intake()
    job_id = registry.submit([b"first"])
    assert not intake.stage(job_id, 0, [b"second"])
    intake.discard(job_id)
    assert intake.submit(job_id, 1, SubmitOptions()) == (job_id, True)  # nobody has planned it yet
    assert registry.leases().lines(job_id, [0]) == [b"first"]
    assert registry.redis.hget(registry.keys.counters, "jobs") == b"1"


def test_a_second_submit_with_the_same_key_is_the_first_job(registry: TestRegistry) -> None:
    options = SubmitOptions(idempotency_key="nightly")
    first = registry.submit([b"line"], options)
    second = registry.keys.new_job_id()
    registry.intake().stage(second, 0, [b"line"])
    assert registry.intake().submit(second, 1, options) == (first, False)
    assert registry.intake().find("default", "nightly") == first
    assert registry.intake().find("other tenant", "nightly") is None


def test_a_job_without_lines_is_refused(registry: TestRegistry) -> None:
    with pytest.raises(EmptyJob):
        registry.intake().submit(registry.keys.new_job_id(), 0, SubmitOptions())


def test_a_missing_line_is_found_and_named(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    intake = registry.intake()
    intake.stage(job_id, 0, [b"a", b"b"])
    intake.stage(job_id, 3, [b"d", b"e"])
    with pytest.raises(JobIncomplete) as caught:
        intake.submit(job_id, 4, SubmitOptions())
    assert (caught.value.expected, caught.value.staged, caught.value.first_missing) == (4, 3, 2)


def test_lines_of_an_older_producer_do_not_mix_with_a_newer_ones(registry: TestRegistry) -> None:
    job_id, intake = registry.keys.new_job_id(), registry.intake()
    intake.stage(job_id, 0, [b"old"] * 3)  # where the job's lines are to be
    intake.stage(job_id, 0, [b"new"] * 2, "nonce")
    assert intake.submit(job_id, 2, SubmitOptions(), Staged("nonce")) == (job_id, True)
    assert not intake.stage(job_id, 3, [b"old"])
    assert intake.submit(job_id, 4, SubmitOptions()) == (job_id, True)  # without a digest: the first job, as before
    assert registry.leases().lines(job_id, range(4)) == [b"new", b"new", None, None]


@pytest.mark.parametrize("spoil", [("1", b"other"), ("0", b"")])
def test_other_bytes_than_were_staged_are_no_job(registry: TestRegistry, spoil: tuple[str, bytes]) -> None:
    job_id, intake, digest = registry.keys.new_job_id(), registry.intake(), LineDigest()
    intake.stage(job_id, 0, [b"one", b"two"], "nonce")
    digest.add([b"one", b"two"])
    registry.redis.hset(registry.keys.staged(job_id, "nonce"), *spoil)
    with pytest.raises((LinesChanged, JobIncomplete), match=r"have 8 bytes, 6 were staged|index 0 is missing"):
        intake.submit(job_id, 2, SubmitOptions(), digest.staged("nonce"))
    assert not registry.redis.exists(registry.keys.job(job_id))


def test_a_job_that_is_too_large_is_refused_with_the_setting_to_raise(registry: TestRegistry) -> None:
    with pytest.raises(JobTooLarge, match=r"limits\.max_prompts_per_job"):
        _submit(registry.intake(limits=LimitSettings(max_prompts_per_job=2)), registry, 3)
    with pytest.raises(JobTooLarge, match=r"12 bytes.*limits\.max_job_bytes"):
        _submit(registry.intake(limits=LimitSettings(max_job_bytes=11, max_prompt_bytes=5)), registry, 3)


@pytest.mark.parametrize(
    ("quota", "scope", "resource"),
    [
        ({"max_open_prompts": 5, "max_prompts_per_job": 5}, "all", "prompts"),
        ({"max_open_bytes": 20, "max_job_bytes": 20, "max_prompt_bytes": 20}, "all", "bytes"),
        ({"max_open_jobs": 1}, "all", "jobs"),
        ({"max_tenant_prompts": 5}, "tenant", "prompts"),
        ({"max_tenant_bytes": 20}, "tenant", "bytes"),
        ({"max_tenant_jobs": 1}, "tenant", "jobs"),
    ],
)
def test_a_full_queue_says_what_is_full_and_when_to_come_back(
    registry: TestRegistry, quota: dict[str, int], scope: str, resource: str
) -> None:
    intake = registry.intake(limits=LimitSettings.model_validate(quota))
    _submit(intake, registry, 3)
    with pytest.raises(QueueFull) as caught:
        _submit(intake, registry, 3)
    assert (caught.value.scope, caught.value.resource) == (scope, resource)
    assert caught.value.retry_after_s > 0
    if scope == "tenant":
        _submit(intake, registry, 3, SubmitOptions(tenant="another"))


def test_finished_prompts_make_room(registry: TestRegistry) -> None:
    intake = registry.intake(limits=LimitSettings(max_open_prompts=3, max_prompts_per_job=3, max_open_jobs=1))
    job_id = _submit(intake, registry, 3)
    leases = registry.leases()
    plan = must_claim(leases, UnitRef.plan(job_id))
    leases.put(plan, [ok(0), ok(1), ok(2)])
    _submit(intake, registry, 3)


def test_the_waiting_time_follows_the_rate_of_work(registry: TestRegistry) -> None:
    intake = registry.intake(limits=LimitSettings(max_open_prompts=100, max_prompts_per_job=100))
    _submit(intake, registry, 100)
    registry.redis.hset(registry.keys.counters, "rate", "5.0")
    with pytest.raises(QueueFull) as caught:
        _submit(intake, registry, 50)
    assert caught.value.retry_after_s == pytest.approx(10.0)  # 50 of 100 prompts at 5 a second


def test_a_refused_job_fails_with_its_reason_and_may_be_submitted_again(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    error = BatchError(code="queue_full", message="no room")
    registry.intake().refuse(job_id, error, "default")
    job = registry.status(job_id)
    assert (job.status, job.error, job.errors) == (JobState.FAILED, "no room", (error,))
    assert registry.redis.ttl(registry.keys.job(job_id)) > 0
    registry.intake().stage(job_id, 0, [b"a", b"b"])
    assert registry.intake().submit(job_id, 2, SubmitOptions()) == (job_id, True)
    assert registry.status(job_id).status is JobState.VALIDATING
    assert registry.redis.ttl(registry.keys.job(job_id)) == -1


def test_a_submission_whose_reply_is_lost_is_still_to_be_announced(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    intake, job_id = registry.intake(), registry.keys.new_job_id()
    intake.stage(job_id, 0, [b"x"])
    registry.submit([b"so that Redis knows the scripts"])
    lost = lose_next_script_reply(registry.redis, monkeypatch)
    assert intake.submit(job_id, 1, SubmitOptions()) == (job_id, True)
    assert lost
    assert registry.redis.hget(registry.keys.counters, "jobs") == b"2"
    leases = registry.leases()
    assert (
        leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard([0])], ageing_s=60.0) is PutStatus.UNIT_DONE
    )
    assert intake.submit(job_id, 1, SubmitOptions()) == (job_id, False)


def test_lines_staged_without_an_end_are_forgotten_unless_a_job_owns_them(registry: TestRegistry) -> None:
    intake, keys, leases = registry.intake(), registry.keys, registry.leases()
    finished, open_id = registry.running_job([0]), registry.submit([b"x"], SubmitOptions(idempotency_key="k"))
    leases.put(must_claim(leases, UnitRef.shard(finished, 0)), [ok(0)])
    registry.submit([b"x"], SubmitOptions(idempotency_key="other"))
    registry.redis.hset(keys.lines(finished), "0", b"staged once more")
    assert intake.submit(finished, 1, SubmitOptions()) == (finished, False)
    assert 0 < registry.redis.ttl(keys.lines(finished)) <= registry.settings.result_ttl_s
    intake.submit(open_id, 1, SubmitOptions(idempotency_key="other"))
    assert registry.redis.ttl(keys.lines(open_id)) == -1


def test_the_rate_of_work_does_not_count_idle_minutes(registry: TestRegistry) -> None:
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0, 1, 2]), 0))

    def rate_after(seconds: int, index: int) -> float:
        registry.redis.hincrby(registry.keys.counters, "rate_at", -seconds * 1000)
        leases.put(claim, [ok(index)])
        return float(registry.redis.hget(registry.keys.counters, "rate") or 0)

    leases.put(claim, [ok(0)])
    assert rate_after(100, 1) == 0  # the window begins again
    assert rate_after(20, 2) == pytest.approx(0.05, rel=0.1)


def test_results_of_a_tenant_are_bounded_until_they_are_gone(registry: TestRegistry) -> None:
    intake, leases = registry.intake(limits=LimitSettings(max_tenant_result_bytes=100)), registry.leases()
    first, second = registry.running_job([0, 1]), registry.running_job([0])

    def put(job_id: str, index: int, size: int) -> None:
        leases.put(claims[job_id], [ok(index, "x" * size)])

    claims = {job_id: must_claim(leases, UnitRef.shard(job_id, 0)) for job_id in (first, second)}
    put(first, 0, 30)
    put(second, 0, 40)
    _submit(intake, registry, 1)
    put(first, 1, 30)  # not more is accepted; what runs goes on
    assert (registry.status(first).result_bytes, registry.status(second).result_bytes) == (60, 40)
    with pytest.raises(QueueFull, match=r"results of the tenant have 100 bytes, limit 100.*millrace delete") as caught:
        _submit(intake, registry, 1)
    assert (caught.value.scope, caught.value.resource, caught.value.used) == ("tenant", "result_bytes", 100)
    assert 86_000 < caught.value.retry_after_s <= 86_400
    _submit(intake, registry, 1, SubmitOptions(tenant="another"))
    registry.control.delete(second)
    _submit(intake, registry, 1)


def test_results_that_are_forgotten_do_not_count_any_more(registry: TestRegistry) -> None:
    leases = registry.leases()
    jobs = [registry.running_job([0], options=SubmitOptions(tenant=tenant)) for tenant in ("a", "a", "b")]
    for job_id in jobs:
        leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0, "x" * 60)])
    ends, counts = f"{registry.keys.counters}:e:a", f"{registry.keys.counters}:r:a"
    assert registry.redis.hget(counts, "bytes") == b"120"
    with registry.redis.pipeline(transaction=True) as both:  # at one time
        both.pttl(ends)
        both.pttl(counts)
        left_ms = both.execute()
    assert 0 < left_ms[0] == pytest.approx(left_ms[1], abs=1)
    registry.redis.zincrby(ends, -1e9, f"{jobs[0]}/60")  # its time has passed
    _submit(registry.intake(limits=LimitSettings(max_tenant_result_bytes=61)), registry, 1, SubmitOptions(tenant="a"))
    assert registry.redis.hget(counts, "bytes") == b"60"
    assert registry.redis.zcard(ends) == 1


def _staged_jobs(
    registry: TestRegistry, announcer: RecordingAnnouncer, client: redis.Redis | None = None
) -> StagedJobs:
    at = registry if client is None else replace(registry, redis=client)
    return StagedJobs(at.intake(), registry.keys, announcer)


def _stage(registry: TestRegistry) -> str:
    """Stage lines like a plain producer: without a time after which they are forgotten."""
    job_id = registry.keys.new_job_id()
    registry.redis.hset(registry.keys.lines(job_id), "0", b"{}")
    return job_id


def test_a_job_that_redis_cannot_take_now_keeps_its_message(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.staged_jobs.RETRY_WAIT_S", 0.01)
    job_id, announcer = _stage(registry), RecordingAnnouncer()
    with redis.Redis(port=1, retry=Retry(NoBackoff(), 0)) as away:
        assert _staged_jobs(registry, announcer, away).submit(job_id, 1, {}) is MessageEnd.REQUEUE
    assert _staged_jobs(registry, announcer).submit(job_id, 1, {}) is MessageEnd.DONE
    assert registry.status(job_id).status is JobState.VALIDATING
    assert announcer.announced == [(UnitRef.plan(job_id), 5)]


def test_a_job_for_which_a_full_redis_has_no_room_keeps_its_message(
    registry: TestRegistry, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.staged_jobs.RETRY_WAIT_S", 0.01)
    job_id, staged_jobs = _stage(registry), _staged_jobs(registry, RecordingAnnouncer())
    with configured(redis_url, maxmemory="1"):
        assert staged_jobs.submit(job_id, 1, {}) is MessageEnd.REQUEUE
        assert not registry.redis.exists(registry.keys.job(job_id))
    assert staged_jobs.submit(job_id, 1, {}) is MessageEnd.DONE
    assert registry.status(job_id).status is JobState.VALIDATING


def test_lines_of_a_plain_producer_are_read_a_mebibyte_at_once(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    job_id, digest = registry.keys.new_job_id(), LineDigest()
    lines = [bytes([65 + index]) * size for index, size in enumerate((300_000,) * 8 + (3_000_000, 1, 2))]
    registry.redis.hset(registry.keys.staged(job_id, "n"), mapping=dict(zip(map(str, range(11)), lines, strict=True)))
    digest.add(lines)
    read: list[list[int]] = []
    hmget = registry.redis.hmget

    def measured(*arguments: Any) -> list[Any]:
        values: list[Any] = list(hmget(*arguments))
        read.append([len(value) for value in values])
        return values

    monkeypatch.setattr(registry.redis, "hmget", measured)
    assert registry.intake().read_staged(job_id, 11, "n") == digest.staged("n")
    assert max(sum(sizes) for sizes in read if len(sizes) > 1) <= 1024 * 1024
    assert sorted(read) == [[1, 2], [300_000] * 2, [300_000] * 3, [300_000] * 3, [3_000_000]]
    read.clear()
    limits = LimitSettings(max_job_bytes=5_400_002)
    assert registry.intake(limits=limits).read_staged(job_id, 11, "n") == Staged("n")  # one byte more: it is refused
    assert read == []


def test_plain_producers_of_one_id_do_not_mix_their_lines(registry: TestRegistry) -> None:
    job_id, staged_jobs = registry.keys.new_job_id(), _staged_jobs(registry, RecordingAnnouncer())
    for nonce, line in (("a", b"first"), ("b", b"other")):
        registry.redis.hset(registry.keys.staged(job_id, nonce), "0", line)
    for nonce in ("a", "a", "b"):  # one message comes twice
        assert staged_jobs.submit(job_id, 1, {"nonce": nonce}) is MessageEnd.DONE
    assert registry.leases().lines(job_id, [0]) == [b"first"]
    assert registry.status(job_id).status is JobState.VALIDATING
    assert not registry.redis.exists(registry.keys.staged(job_id, "a"))
    assert 0 < registry.redis.ttl(registry.keys.staged(job_id, "b")) <= 3600


def test_a_plain_producer_is_told_that_its_key_has_other_lines(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    staged_jobs, (first, second) = _staged_jobs(registry, RecordingAnnouncer()), (_stage(registry), _stage(registry))
    registry.redis.hset(registry.keys.lines(second), "0", b"other")
    for job_id in (first, second):
        staged_jobs.submit(job_id, 1, {"idempotency_key": "a secret"})
    assert registry.status(second).error == f"its idempotency_key belongs to job {first}, which has other lines"
    assert [error.param for error in registry.status(second).errors] == ["idempotency_key"]
    assert "a secret" not in caplog.text


def test_a_second_copy_of_the_message_announces_a_job_that_is_still_queued(registry: TestRegistry) -> None:
    job_id, announcer = _stage(registry), RecordingAnnouncer()
    staged_jobs = _staged_jobs(registry, announcer)
    for _ in range(2):
        assert staged_jobs.submit(job_id, 1, {}) is MessageEnd.DONE
    assert announcer.announced == [(UnitRef.plan(job_id), 5)] * 2


@pytest.mark.parametrize(
    ("num_lines", "options", "code", "param"),
    [
        (2, {}, "invalid_request", None), (0, {}, "empty_file", None), ("many", {}, "invalid_request", "n"),
        (60_000, {}, "too_many_tasks", None), (1, {"priority": 99}, "invalid_request", "priority"),
        (1, {"endpoint": "/v1/moderations"}, "invalid_request", "endpoint"),
        (1, {"nonce": "a:b"}, "invalid_request", "nonce"), (1, {"nonce": 7}, "invalid_request", "nonce"),
    ],
)  # fmt: skip
def test_a_refused_job_says_why_and_its_lines_are_forgotten(
    registry: TestRegistry, num_lines: object, options: dict[str, object], code: str, param: str | None
) -> None:
    job_id = _stage(registry)
    assert _staged_jobs(registry, RecordingAnnouncer()).submit(job_id, num_lines, options) is MessageEnd.DONE
    job = registry.status(job_id)
    assert job.status is JobState.FAILED
    assert [(error.code, error.param, error.line) for error in job.errors] == [(code, param, None)]
    assert 0 < registry.redis.ttl(registry.keys.lines(job_id)) <= 3600


def test_lines_that_are_no_hash_are_refused_and_do_not_go_round(registry: TestRegistry) -> None:
    job_id = registry.keys.new_job_id()
    registry.redis.rpush(registry.keys.lines(job_id), b"{}")
    assert _staged_jobs(registry, RecordingAnnouncer()).submit(job_id, 1, {}) is MessageEnd.DONE
    job = registry.status(job_id)
    assert job.status is JobState.FAILED
    assert "hash of index and line" in (job.error or "")
    assert registry.redis.ttl(registry.keys.lines(job_id)) > 0


def test_lines_staged_for_an_accepted_job_are_forgotten_in_time(registry: TestRegistry) -> None:
    job_id = registry.submit([b"line"])
    staged = registry.keys.staged(job_id, "nonce")
    registry.redis.hset(staged, "0", "line")  # by a plain Celery producer
    registry.intake().refuse(job_id, BatchError(code="invalid_request", message="no"), "default", "nonce")
    assert registry.redis.ttl(staged) > 0
    assert registry.redis.ttl(registry.keys.lines(job_id)) == -1
