"""Cancelling a running job."""

from __future__ import annotations

from pathlib import Path

from tests.support.wait_until import wait_until
from tests.support.workers import QUICK_HEARTBEATS, running_workers
from worker.client import BatchClient


def test_cancel_keeps_what_is_finished_and_ends_the_rest_with_a_record_each(redis_url: str, tiny_model: Path) -> None:
    short = [{"prompt": f"short {i}", "max_tokens": 2, "temperature": 0} for i in range(8)]
    long = [{"prompt": f"long {i}", "max_tokens": 900, "temperature": 0, "ignore_eos": True} for i in range(40)]
    with running_workers(redis_url, tiny_model, 1, *QUICK_HEARTBEATS) as (worker,), BatchClient(redis_url) as client:
        job_id = client.submit([*short, *long])
        wait_until(lambda: client.status(job_id).request_counts.completed >= len(short), timeout_s=30.0)
        client.cancel(job_id)
        status = client.wait(job_id, timeout_s=10.0)
        wait_until(lambda: all(w.open_requests == 0 for w in client.workers()), timeout_s=10.0)
        records = list(client.results(job_id))
        again = client.submit([{"prompt": "after", "max_tokens": 2}])
        assert client.wait(again, timeout_s=30.0).request_counts.completed == 1
        assert worker.poll() is None
    assert status.status == "cancelled"
    assert len(records) == len(short) + len(long)
    codes = [record["error"]["code"] for record in records if record["error"] is not None]
    finished = [record for record in records if record["error"] is None]
    assert len(finished) == status.request_counts.completed >= len(short)
    assert set(codes) == {"batch_cancelled"}
