"""Jobs that are cancelled or expire, queued or running: within 5 s, and what had finished stays."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import running_fleet
from tests.chaos.invariants import check_nothing_is_left, check_records
from tests.chaos.jobs import prompts
from tests.chaos.undisturbed import contents, undisturbed
from tests.chaos.worker_options import WorkerOptions
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.schemas import JobState

pytestmark = pytest.mark.chaos

NUM_PROMPTS = 200
# 8 of 200 prompts every 0.3 s: a job lasts for more than seven seconds.
SLOW = WorkerOptions(engine={"steps_per_request": 30, "step_s": 0.01})
END_S = 5.0
LINES = prompts(NUM_PROMPTS)


def _fill_every_slot(client: BatchClient) -> None:
    busy = client.submit(prompts(NUM_PROMPTS, of="busy"), priority=0)
    wait_until(lambda: client.status(busy).request_counts.completed > 0)


def _cancel_others(client: BatchClient, job_id: str) -> None:
    for job in client.jobs():
        if job.id != job_id:
            client.cancel(job.id)


def _check(client: BatchClient, bare: redis.Redis, job_id: str, state: JobState, code: str) -> int:
    """The job ends in time with whole records; how many prompts have an answer."""
    job = client.wait(job_id, END_S)
    assert job.status is state
    check_records(client, bare, job_id, num_prompts=NUM_PROMPTS)
    check_nothing_is_left(bare)
    found, expected = contents(client.results(job_id)), undisturbed(LINES)
    failed = {name for name, record in found.items() if record["error"] is not None}
    assert {found[name]["error"]["code"] for name in failed} == {code}
    assert all(found[name] == expected[name] for name in found.keys() - failed)
    return NUM_PROMPTS - len(failed)


@pytest.mark.parametrize(
    ("end", "state", "code"),
    [
        ("cancel", JobState.CANCELLED, "batch_cancelled"),
        ("deadline", JobState.EXPIRED, "batch_expired"),
    ],
)
@pytest.mark.parametrize("phase", ["queued", "running"])
def test_a_job_that_is_ended_early_keeps_what_had_finished(
    end: str,
    state: JobState,
    code: str,
    phase: str,
    client: BatchClient,
    bare: redis.Redis,
    redis_url: str,
    tmp_path: Path,
) -> None:
    with running_fleet(redis_url, tmp_path, SLOW) as fleet:
        fleet.start()
        fleet.wait_up(client)
        if phase == "queued":
            _fill_every_slot(client)
        job_id = client.submit(LINES, deadline_s=1.5 if end == "deadline" else None)
        if phase == "running":
            wait_until(lambda: client.status(job_id).request_counts.completed > 0)
        if end == "cancel":
            client.cancel(job_id)
        else:
            wait_until(lambda: client.status(job_id).status.is_terminal)
        if phase == "queued":
            _cancel_others(client, job_id)
        num_answered = _check(client, bare, job_id, state, code)
        assert (num_answered > 0) == (phase == "running")
        assert fleet.stop() == [0]
