"""Lines, files and messages made to break a parser, among innocent ones."""

from __future__ import annotations

from pathlib import Path

import pytest
import redis
from celery import Celery

from tests.chaos.faults import DEATHS_OF_PLANS
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.jobs import (
    check_counters,
    check_invariants,
    check_nothing_is_left,
    check_records,
    contents,
    prompts,
    submit_jobs,
    undisturbed,
    wait_all,
)
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from tests.support.request_lines import error_body
from worker.client import BatchClient
from worker.registry.keys import Keys
from worker.schemas import JobState

pytestmark = pytest.mark.chaos

BAD_LINES = [
    b'{"custom_id": "surrogate", "prompt": "\\ud83d"}',
    b'{"custom_id": "utf-8", "prompt": "\xff\xfe"}',
    b'{"custom_id": "nan", "prompt": "x", "temperature": NaN}',
    b'{"custom_id": "infinity", "prompt": "x", "temperature": 1e999}',
    b'{"custom_id": "deep", "prompt": ' + b"[" * 10_000 + b"]" * 10_000 + b"}",
    b'{"custom_id": "twice", "prompt": "x", "prompt": "y"}',
    b'{"custom_id": "n", "prompt": "x", "n": 1000000}',
    b'{"custom_id": "max_tokens", "prompt": "x", "max_tokens": -1}',
    b'{"custom_id": "long", "prompt": "' + b"x" * 5000 + b'"}',
    b'{"custom_id": "huge", "prompt": "' + b"x" * 300_000 + b'"}',
    b"not JSON",
    b"\0\0\0",
]


def test_each_gets_an_error_record_and_the_innocent_get_their_answers(
    client: BatchClient, bare: redis.Redis, fleet: Fleet
) -> None:
    worker = fleet.start()
    good = prompts(40)
    job_id = client.submit([line for pair in zip(good, BAD_LINES * 4, strict=False) for line in pair])
    job = client.wait(job_id, 30)
    assert (job.request_counts.completed, job.request_counts.failed) == (40, 40)
    check_records(client, bare, job_id, num_prompts=80)
    check_nothing_is_left(bare)
    records = list(client.results(job_id))
    answered = contents(record for record in records if error_body(record) is None)
    assert answered == undisturbed(good)
    for record in records:
        body = error_body(record)
        assert body is None or (body["code"] and body["message"])
    assert fleet.stop() == [0]
    assert worker.num_lives == 1


@pytest.mark.parametrize("point", DEATHS_OF_PLANS)
def test_a_bad_file_is_refused_once_although_its_planner_is_killed(
    point: str, client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path) as fleet:
        worker = fleet.start(die_at=point)
        fleet.wait_up(client)
        job_id = client.submit([*prompts(300), b"{"], strict=True)
        wait_until(lambda: worker.num_lives == 2)
        check_counters(bare)
        job = client.wait(job_id, 45.0)
        assert (job.status, job.request_counts.total) == (JobState.FAILED, 0)
        assert [(error.code, error.line) for error in job.errors] == [("invalid_json_line", 301)]
        assert list(client.results(job_id)) == []
        check_nothing_is_left(bare)
        assert fleet.stop() == [0]


def test_a_task_of_a_newer_producer_goes_to_the_dead_list(
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
    gate = tmp_path / "gate"
    engine = {"steps_per_request": 10, "step_s": 0.01, "gate": str(gate)}
    options = WorkerOptions(engine=engine, log_level="DEBUG")
    with running_fleet(redis_url, tmp_path, options, {"worker.lease_s": "30"}) as fleet:
        for is_newer in (False, True):
            fleet.start(has_other_scripts=is_newer)
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=3, num_prompts=60)
        wait_until(lambda: all(worker.num_received > 3 for worker in fleet.workers))  # four of 18 shards each
        gate.touch()
        wait_all(client, jobs)
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]


def test_a_job_of_a_newer_schema_waits_for_a_worker_that_knows_it(
    client: BatchClient, bare: redis.Redis, fleet: Fleet
) -> None:
    jobs = submit_jobs(client, num_jobs=1, num_prompts=20)
    (newer,) = jobs
    bare.hset(Keys().job(newer), "v", 5)
    fleet.start()
    jobs |= submit_jobs(client, num_jobs=1, num_prompts=20)
    wait_until(lambda: client.status([*jobs][1]).status.is_terminal, timeout_s=20)
    wait_until(lambda: int(bare.hget(f"{Keys().prefix}j:{newer}:s:plan", "rp") or 0) >= 1)  # a worker looked at it
    assert client.status(newer).status is JobState.VALIDATING
    bare.hset(Keys().job(newer), "v", 1)
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)
    assert fleet.stop() == [0]
