"""Prompts of several jobs in one worker at the same time."""

from __future__ import annotations

from pathlib import Path

from tests.support.workers import running_workers
from worker.client import BatchClient


def test_equal_prompts_of_several_jobs_and_tenants_have_a_record_each(redis_url: str, tiny_model: Path) -> None:
    lines = [{"prompt": f"the same question {n % 5}", "max_tokens": 8, "temperature": 0} for n in range(20)]
    with BatchClient(redis_url) as client:
        # Before there is a worker: it then has all of them at once.
        job_ids = [client.submit(lines, tenant=tenant) for tenant in ("one", "one", "other")]
        with running_workers(redis_url, tiny_model, 1):
            jobs = [client.wait(job_id, timeout_s=60.0) for job_id in job_ids]
        found = [
            {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in client.results(job_id)}
            for job_id in job_ids
        ]
    assert [job.request_counts.completed for job in jobs] == [20, 20, 20]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 20
    assert {found[0][f"line-{n}"] for n in (1, 6, 11, 16)} == {found[0]["line-1"]}
