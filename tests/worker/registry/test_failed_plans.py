"""Jobs whose file is refused as a whole."""

from __future__ import annotations

import pytest

from tests.support.lost_replies import lose_next_script_reply
from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import ClaimRefusal, PutStatus, RunMode
from worker.schemas import BatchError, JobState, SubmitOptions

BAD = (BatchError(code="invalid_json_line", message="not JSON", line=2),)
FAILED = (PutStatus.JOB_DONE, RunMode.RUN)


def test_a_refused_file_gives_back_what_its_job_had(registry: TestRegistry) -> None:
    options = SubmitOptions(strict=True, tenant="acme", idempotency_key="k")
    job_id = registry.submit([b"a", b"b", b"c"], options)
    leases = registry.leases()
    assert leases.fail(must_claim(leases, UnitRef.plan(job_id)), "1 line is bad", BAD) == FAILED
    job = registry.status(job_id)
    assert (job.status, job.error, job.errors) == (JobState.FAILED, "1 line is bad", BAD)
    assert job.finished_at is not None
    keys, bare = registry.keys, registry.redis
    assert bare.hmget(keys.admission, "prompts", "bytes", "jobs") == [b"0", b"0", b"0"]
    assert not bare.exists(keys.tenant_admission("acme"), keys.lines(job_id), keys.unit(UnitRef.plan(job_id)))
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
    assert registry.redis.hget(registry.keys.admission, "jobs") == b"0"


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
    """Those of the version before leave version 2 alone."""
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
