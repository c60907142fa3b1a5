"""Workers that are told to stop: nothing is lost, and giving back is no crash."""

from __future__ import annotations

import time
from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.fleet_worker import FleetWorker
from tests.chaos.invariants import check_invariants
from tests.chaos.jobs import submit_jobs, wait_all
from tests.chaos.undisturbed import Record
from tests.chaos.worker_options import WorkerOptions
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.registry.keys import Keys

pytestmark = pytest.mark.chaos

# A prompt takes two seconds: longer than the drain limit of 0.5 s.
LONG = WorkerOptions(engine={"steps_per_request": 200, "step_s": 0.01, "slots": 60})
Jobs = dict[str, dict[str, Record]]


def _start_with_work(fleet: Fleet, client: BatchClient, bare: redis.Redis, drain_s: float) -> tuple[FleetWorker, Jobs]:
    """A worker, not supervised, that has begun all the shards of two jobs."""
    worker = fleet.start(is_supervised=False, worker__drain_timeout_s=str(drain_s), worker__concurrency="8")
    fleet.wait_up(client)
    jobs = submit_jobs(client, num_jobs=2, num_prompts=30)
    wait_until(lambda: [bare.hget(shard, "st") for shard in _shards(bare)] == [b"running"] * 6)
    return worker, jobs


def _shards(bare: redis.Redis) -> list[bytes]:
    return [key for key in bare.scan_iter(f"{Keys().prefix}j:*:s:*") if not key.endswith(b":plan")]


def _check_given_back(bare: redis.Redis) -> None:
    for shard in _shards(bare):
        assert bare.hmget(shard, "st", "att") == [b"queued", b"0"]
    assert not bare.exists("unacked")


def _finish(fleet: Fleet, client: BatchClient, bare: redis.Redis, jobs: Jobs) -> None:
    fleet.start()
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)
    assert fleet.stop()[-1] == 0


def test_sigterm_releases_what_outlasts_the_drain_and_costs_no_attempt(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=0.5)
        worker.terminate()
        assert worker.wait(10) == 0
        _check_given_back(bare)
        _finish(fleet, client, bare, jobs)


def test_sigterm_finishes_what_the_drain_has_time_for(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=30)
        worker.terminate()
        assert worker.wait(15) == 0
        assert all(client.status(job_id).status.is_terminal for job_id in jobs)
        check_invariants(client, bare, jobs)


def test_sigquit_gives_everything_back_within_two_seconds(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=60)
        worker.quit()
        assert worker.wait(2) == 0
        _check_given_back(bare)
        _finish(fleet, client, bare, jobs)


def test_a_second_sigterm_changes_nothing_about_the_drain(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=1)
        worker.terminate()
        time.sleep(0.3)
        worker.terminate()
        assert worker.wait(10) == 0
        _check_given_back(bare)
        _finish(fleet, client, bare, jobs)
