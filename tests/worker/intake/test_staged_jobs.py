from __future__ import annotations

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from settings import Settings
from tests.support.registry import TestRegistry
from tests.support.units import RecordingAnnouncer
from worker.broker.messages import MessageEnd
from worker.registry.keys import UnitRef
from worker.runtime.staged_jobs import StagedJobs
from worker.schemas import JobState


def _staged_jobs(
    registry: TestRegistry, announcer: RecordingAnnouncer, client: redis.Redis | None = None
) -> StagedJobs:
    return StagedJobs(client or registry.redis, registry.keys, announcer, settings=Settings())


def _stage(registry: TestRegistry) -> str:
    """As a plain producer does: no time after which the lines are forgotten."""
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
