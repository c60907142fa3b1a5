"""Workers whose clocks are two hours off. Leases follow Redis' clock, which no test can set: that is not staged."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import running_fleet
from tests.chaos.invariants import check_invariants
from tests.chaos.jobs import submit_jobs, wait_all
from tests.chaos.worker_options import WorkerOptions
from worker.client import BatchClient

pytestmark = pytest.mark.chaos

SLOW = WorkerOptions(engine={"steps_per_request": 10, "step_s": 0.01}, visibility_timeout_s=3600, log_level="DEBUG")
TWO_HOURS_S = 7200.0
NUM_JOBS, SHARDS_OF_A_JOB = 6, 6


def test_a_worker_two_hours_ahead_and_one_behind_disturb_nobody(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, SLOW) as fleet:
        for shift_s in (0.0, TWO_HOURS_S, -TWO_HOURS_S):
            fleet.start(clock_shift_s=shift_s)
        fleet.wait_up(client)
        created_at = bare.time()[0]
        jobs = submit_jobs(client, NUM_JOBS, num_prompts=10 * SHARDS_OF_A_JOB)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        for job_id in jobs:
            assert abs(client.status(job_id).created_at - created_at) < 60
            assert {abs(r["response"]["body"]["created"] - created_at) < 60 for r in client.results(job_id)} == {True}
        # The one ahead takes every message that is being worked on for an hour old, and sends it again.
        assert sum(worker.log.count(" received\n") for worker in fleet.workers) > NUM_JOBS * (1 + SHARDS_OF_A_JOB)
        assert fleet.stop() == [0, 0, 0]
        assert fleet.num_restarts == 0
