"""An engine that breaks once: its worker ends with 70, its successor does the work.

A prompt that breaks or kills every engine is in the tests of quarantine, one that is merely refused in
tests/worker/process/test_worker_process.py.
"""

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

SLOW = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.005})


def test_a_broken_engine_ends_its_worker_and_the_next_one_finishes(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, SLOW) as fleet:
        worker = fleet.start(die_at="engine breaks")
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=40)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert worker.exit_codes == [70]
        assert fleet.stop() == [0]


def test_after_a_fault_of_the_device_nobody_touches_it_and_another_worker_goes_on_at_once(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    lease = {"worker.lease_s": "300"}  # who waits for a lease to run out waits longer than this test does
    with running_fleet(redis_url, tmp_path, SLOW, lease) as fleet:
        faulty = fleet.start(die_at="device faults", is_supervised=False)
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=2, num_prompts=40)
        assert faulty.wait(20) == 70
        assert "an illegal memory access was encountered" in faulty.log
        fleet.start()
        wait_all(client, jobs, timeout_s=20)
        check_invariants(client, bare, jobs)
