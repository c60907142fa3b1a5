"""Redis ends and comes back, with what it knew or without, or cuts every connection again and again."""

from __future__ import annotations

import time
from functools import partial
from pathlib import Path

import pytest
import redis

from tests.chaos.faults import FileHistory, drop_connections, file_history, flush_scripts, freeze_redis
from tests.chaos.fleet import running_fleet
from tests.chaos.jobs import (
    check_counters,
    check_invariants,
    impatient_client,
    insist,
    prompts,
    submit_jobs,
    undisturbed,
    wait_all,
)
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from tests.support.redis_servers import RestartableRedis
from worker.client import BatchClient
from worker.registry.errors import JobNotFound
from worker.registry.keys import Keys
from worker.registry.trust import has_renewed

SLOW = WorkerOptions(engine={"steps_per_request": 10, "step_s": 0.01})
DOWN_S = 1.0

EIGHT_STEPS = WorkerOptions(engine={"steps_per_request": 8, "step_s": 0.01})


def _restart(server: RestartableRedis, how: str) -> None:
    if how == "SIGKILL":
        server.kill()
    else:
        server.stop()
    time.sleep(DOWN_S)
    server.start()


@pytest.mark.parametrize("how", ["SIGKILL", pytest.param("SIGTERM", marks=pytest.mark.chaos)])
def test_with_an_append_only_file_nothing_is_lost(how: str, durable_redis: RestartableRedis, tmp_path: Path) -> None:
    with (
        running_fleet(durable_redis.url, tmp_path, SLOW) as fleet,
        impatient_client(durable_redis.url) as client,
        redis.Redis.from_url(durable_redis.url) as bare,
    ):
        for _ in range(2):
            fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=80)
        for _ in range(2):
            _restart(durable_redis, how)
            wait_until(lambda: has_renewed(insist(partial(bare.info, "persistence"))))
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0


def _lose_all(server: RestartableRedis, bare: redis.Redis, how: str) -> None:
    if how == "FLUSHALL":
        bare.flushall()
    else:
        _restart(server, "SIGTERM")


@pytest.mark.chaos
@pytest.mark.parametrize("how", ["FLUSHALL", "restart"])
def test_without_one_lost_jobs_are_not_found_and_may_be_submitted_again(
    how: str, forgetful_redis: RestartableRedis, tmp_path: Path
) -> None:
    lines = prompts(60)
    with (
        running_fleet(forgetful_redis.url, tmp_path, SLOW) as fleet,
        impatient_client(forgetful_redis.url) as client,
        redis.Redis.from_url(forgetful_redis.url) as bare,
    ):
        fleet.start()
        fleet.wait_up(client)
        lost = _submit_again(client, lines)
        wait_until(lambda: client.status(lost).request_counts.finished > 0)
        _lose_all(forgetful_redis, bare, how)
        with pytest.raises(JobNotFound):
            insist(lambda: client.status(lost))
        wait_until(lambda: [worker.held for worker in insist(client.workers)] == [0])  # it saw that its units are gone
        assert not list(bare.scan_iter(f"{Keys().prefix}j:*"))
        check_counters(bare)
        job_id = _submit_again(client, lines)
        assert job_id != lost
        jobs = {job_id: undisturbed(lines)}
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0]
        assert fleet.num_restarts == 0


def _num_connections(bare: redis.Redis) -> int:
    """Clients of Redis, without our own."""
    return len(bare.client_list(_type="normal")) - 1


def _submit_again(client: BatchClient, lines: list[dict[str, str]]) -> str:
    return insist(lambda: client.submit(lines, idempotency_key="the same each time"))


@pytest.mark.chaos
def test_lost_connections_and_forgotten_scripts_change_no_record(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, EIGHT_STEPS) as fleet:
        for _ in range(2):
            fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=4, num_prompts=60)
        num_dropped = 0
        for _ in range(8):
            wait_until(lambda: _num_connections(bare) > 2)  # the workers connect again
            num_dropped += drop_connections(bare)
            flush_scripts(bare)
            time.sleep(0.15)  # a lull, in which work is done
        assert num_dropped > 16
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0


PATIENT = {"worker.lease_s": "2", "worker.renew_interval_s": "1"}  # its holder counts as gone two seconds later


def _fail(how: str, bare: redis.Redis, history: FileHistory) -> None:
    if how == "outage":
        freeze_redis(bare, 3 * float(PATIENT["worker.lease_s"]))
    else:
        history.cut(1.5, down_s=float(how) * float(PATIENT["worker.lease_s"]))


@pytest.mark.parametrize("how", ["0.1", "1.5", pytest.param("outage", marks=pytest.mark.chaos)])
def test_a_fault_of_redis_alone_makes_no_suspect(how: str, durable_redis: RestartableRedis, tmp_path: Path) -> None:
    with (
        running_fleet(durable_redis.url, tmp_path, SLOW, PATIENT) as fleet,
        impatient_client(durable_redis.url) as client,
        redis.Redis.from_url(durable_redis.url) as bare,
        file_history(durable_redis) as history,
    ):
        for _ in range(2):
            fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=400)
        wait_until(lambda: all(client.status(job_id).request_counts.finished for job_id in jobs))
        time.sleep(1.6)  # further than the fault goes back, so that each job survives it
        _fail(how, bare, history)
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert not any("crashed a worker" in worker.log for worker in fleet.workers)
        assert fleet.stop() == [0, 0]
        assert fleet.num_restarts == 0
