"""SIGSTOP for longer than a lease: the frozen worker wakes up to shards that are somebody else's.

Writing to them all the same is in test_bad_networks.py: a worker that wakes up renews first, and learns of it.
"""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import running_fleet
from tests.chaos.invariants import check_invariants
from tests.chaos.jobs import submit_jobs, wait_all, was_claimed_again
from tests.chaos.worker_options import WorkerOptions
from tests.support.wait_until import wait_until
from worker.client import BatchClient

# 40 prompts a second: both jobs last for three seconds.
SLOW = WorkerOptions(engine={"steps_per_request": 5, "step_s": 0.01, "slots": 2})


@pytest.mark.chaos
def test_a_worker_frozen_past_its_lease_wakes_up_and_disturbs_nobody(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, SLOW) as fleet:
        frozen = fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=2, num_prompts=60)
        (first, *_) = jobs
        wait_until(lambda: client.status(first).request_counts.finished > 0)
        frozen.freeze()
        fleet.start()
        fleet.wait_up(client, count=2)
        # Somebody else has its second claim on a shard: a crashed lease, since nothing was given back.
        wait_until(lambda: was_claimed_again(bare))
        time.sleep(0.3)
        frozen.thaw()
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0
