"""Messages and jobs of other versions. Frames that are no message are in tests/worker/broker/test_guard.py."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from celery import Celery

from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.invariants import check_invariants
from tests.chaos.jobs import submit_jobs, wait_all
from tests.chaos.worker_options import WorkerOptions
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.registry.keys import Keys
from worker.schemas import JobState

pytestmark = pytest.mark.chaos


def test_a_task_of_a_newer_producer_goes_to_the_dead_list_and_the_worker_goes_on(
    client: BatchClient, bare: redis.Redis, fleet: Fleet, redis_url: str
) -> None:
    fleet.start()
    fleet.wait_up(client)
    producer = Celery(broker=redis_url, set_as_current=False)
    producer.send_task("millrace.run_shard_v2", args=["s0-x", 0], queue="millrace")
    producer.close()
    wait_until(lambda: bare.llen(Keys().dead_frames) == 1)
    jobs = submit_jobs(client, num_jobs=1, num_prompts=20)
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)
    assert fleet.stop() == [0]
    assert fleet.num_restarts == 0


def test_workers_of_two_versions_share_jobs_each_with_its_own_scripts(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    slow = WorkerOptions(engine={"steps_per_request": 10, "step_s": 0.01}, log_level="DEBUG")
    with running_fleet(redis_url, tmp_path, slow) as fleet:
        for is_newer in (False, True):
            fleet.start(has_other_scripts=is_newer)
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=60)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert all(worker.log.count(" received\n") > 3 for worker in fleet.workers)  # both of them worked
        assert fleet.stop() == [0, 0]


def test_a_job_of_a_newer_schema_waits_for_a_worker_that_knows_it(
    client: BatchClient, bare: redis.Redis, fleet: Fleet
) -> None:
    jobs = submit_jobs(client, num_jobs=1, num_prompts=20)
    (newer,) = jobs
    bare.hset(Keys().job(newer), "v", 3)
    fleet.start()
    jobs |= submit_jobs(client, num_jobs=1, num_prompts=20)
    wait_until(lambda: client.status([*jobs][1]).status.is_terminal, timeout_s=20)
    wait_until(lambda: int(bare.hget(f"{Keys().prefix}j:{newer}:s:plan", "rp") or 0) >= 1)  # it was looked at
    assert client.status(newer).status is JobState.VALIDATING
    bare.hset(Keys().job(newer), "v", 1)
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)
    assert fleet.stop() == [0]
