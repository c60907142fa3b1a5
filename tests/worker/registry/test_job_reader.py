from __future__ import annotations

from tests.support.registry import TestRegistry


def _jobs(registry: TestRegistry, count: int) -> list[str]:
    """Oldest first."""
    job_ids = [registry.submit([b"x"]) for _ in range(count)]
    registry.redis.zadd(registry.keys.jobs, {job_id: number for number, job_id in enumerate(job_ids, 1)})
    return job_ids


def test_dropping_forgotten_jobs_skips_no_live_one(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 6)
    for job_id in job_ids[-2:]:
        registry.redis.delete(registry.keys.job(job_id))
    assert [job.id for job in registry.reader.jobs(2)] == [job_ids[3], job_ids[2]]
    assert registry.redis.zcard(registry.keys.jobs) == 4


def test_the_newest_jobs_come_first_and_no_more_than_asked_for(registry: TestRegistry) -> None:
    job_ids = _jobs(registry, 3)
    assert [job.id for job in registry.reader.jobs(2)] == [job_ids[2], job_ids[1]]
    assert [job.id for job in registry.reader.jobs(10)] == job_ids[::-1]
    assert registry.reader.jobs(0) == []
