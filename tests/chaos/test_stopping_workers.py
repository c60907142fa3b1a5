"""Workers that are told to stop, whose engine breaks, or whose clock is wrong: nothing is lost.

Leases follow Redis' clock, which no test can set: that is not staged.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import Fleet, FleetWorker, running_fleet
from tests.chaos.jobs import Record, check_invariants, submit_jobs, wait_all
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from worker.client import BatchClient
from worker.registry.keys import Keys

pytestmark = pytest.mark.chaos

# A prompt takes two seconds, twice as long as a drain that must be too short for it.
LONG = WorkerOptions(engine={"steps_per_request": 200, "step_s": 0.01, "slots": 60})
LEASES = {"worker.lease_s": "30"}  # none runs out: giving back costs no attempt
STOP_S = 40.0  # on a busy machine
Jobs = dict[str, dict[str, Record]]

SLOW = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.005})

TWO_HOURS_S = 7200.0
NUM_JOBS, SHARDS_OF_A_JOB = 6, 6


def _start_with_work(fleet: Fleet, client: BatchClient, bare: redis.Redis, drain_s: float) -> tuple[FleetWorker, Jobs]:
    """An unsupervised worker that has begun all shards of two jobs."""
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
    with running_fleet(redis_url, tmp_path, LONG, LEASES) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=0.5)
        worker.terminate()
        assert worker.wait(STOP_S) == 0
        _check_given_back(bare)
        _finish(fleet, client, bare, jobs)


def test_sigterm_finishes_what_the_drain_has_time_for(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG, LEASES) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=30)
        worker.terminate()
        assert worker.wait(STOP_S) == 0
        assert all(client.status(job_id).status.is_terminal for job_id in jobs)
        check_invariants(client, bare, jobs)


def test_sigquit_gives_everything_back_at_once(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG, LEASES) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=60)
        worker.quit()
        assert worker.wait(STOP_S) == 0  # not after the drain of a minute
        _check_given_back(bare)
        _finish(fleet, client, bare, jobs)


def test_a_second_sigterm_changes_nothing_about_the_drain(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, LONG, LEASES) as fleet:
        worker, jobs = _start_with_work(fleet, client, bare, drain_s=1)
        worker.terminate()
        wait_until(lambda: " stops\n" in worker.log)  # it drains
        worker.terminate()
        assert worker.wait(STOP_S) == 0
        _check_given_back(bare)
        _finish(fleet, client, bare, jobs)


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


def test_after_a_device_fault_another_worker_goes_on_at_once(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    lease = {"worker.lease_s": "300"}  # waiting for a lease to run out would take longer than this test may
    with running_fleet(redis_url, tmp_path, SLOW, lease) as fleet:
        faulty = fleet.start(die_at="device faults", is_supervised=False)
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=2, num_prompts=40)
        assert faulty.wait(STOP_S) == 70
        assert "an illegal memory access was encountered" in faulty.log
        fleet.start()
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)


def test_a_worker_two_hours_ahead_and_one_behind_disturb_nobody(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    gate = tmp_path / "gate"
    engine = {"steps_per_request": 10, "step_s": 0.01, "gate": str(gate)}
    options = WorkerOptions(engine=engine, visibility_timeout_s=3600, log_level="DEBUG")
    with running_fleet(redis_url, tmp_path, options) as fleet:
        for shift_s in (0.0, TWO_HOURS_S, -TWO_HOURS_S):
            fleet.start(clock_shift_s=shift_s)
        fleet.wait_up(client)
        created_at = bare.time()[0]
        jobs = submit_jobs(client, NUM_JOBS, num_prompts=10 * SHARDS_OF_A_JOB)
        # To the clock that is ahead every message in work is an hour old: that worker sends it again.
        num_messages = NUM_JOBS * (1 + SHARDS_OF_A_JOB)
        wait_until(lambda: sum(worker.num_received for worker in fleet.workers) > num_messages)
        gate.touch()
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        for job_id in jobs:
            assert abs(client.status(job_id).created_at - created_at) < 60
            assert {abs(r["response"]["body"]["created"] - created_at) < 60 for r in client.results(job_id)} == {True}
        assert fleet.stop() == [0, 0, 0]
        assert fleet.num_restarts == 0
