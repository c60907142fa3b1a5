"""CLIENT KILL: every connection to Redis is cut, again and again."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from tests.chaos.faults import drop_connections, flush_scripts
from tests.chaos.fleet import running_fleet
from tests.chaos.invariants import check_invariants
from tests.chaos.jobs import submit_jobs, wait_all
from tests.chaos.worker_options import WorkerOptions
from worker.client import BatchClient

SLOW = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.01})


@pytest.mark.chaos
def test_a_storm_of_lost_connections_and_forgotten_scripts_changes_no_record(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, SLOW) as fleet:
        for _ in range(2):
            fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=4, num_prompts=60)
        num_dropped = 0
        for _ in range(8):
            num_dropped += drop_connections(bare)
            flush_scripts(bare)
            time.sleep(0.15)
        assert num_dropped > 16
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0
