"""Messages that never arrive, or arrive ten times: they are hints, the registry has the truth."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest
import redis
from kombu.exceptions import OperationalError

from tests.chaos.faults import duplicate_message, lanes, steal_message
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.invariants import check_invariants
from tests.chaos.jobs import submit_jobs, wait_all
from tests.chaos.worker_options import WorkerOptions
from worker.client import BatchClient


@pytest.mark.chaos
def test_a_job_whose_every_message_was_stolen_is_announced_again(
    client: BatchClient, bare: redis.Redis, fleet: Fleet
) -> None:
    jobs = submit_jobs(client, num_jobs=3, num_prompts=30)
    num_stolen = 0
    while steal_message(bare):
        num_stolen += 1
    assert num_stolen == 3
    fleet.start()
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)


def test_a_submit_whose_message_cannot_be_published_is_accepted_and_done(
    client: BatchClient, bare: redis.Redis, fleet: Fleet, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OperationalError("the broker is not there")

    with monkeypatch.context() as patch:
        patch.setattr(client._app, "send_task", fail)
        jobs = submit_jobs(client, num_jobs=1, num_prompts=20)
    assert not any(bare.llen(lane) for lane in lanes())
    fleet.start()
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)


@pytest.mark.chaos
def test_ten_copies_of_every_message_on_two_workers_give_one_record_a_prompt(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    with running_fleet(redis_url, tmp_path, WorkerOptions(engine={"steps_per_request": 5, "step_s": 0.02})) as fleet:
        for _ in range(2):
            fleet.start()
        fleet.wait_up(client)
        jobs = submit_jobs(client, num_jobs=4, num_prompts=60)
        num_copied = 0
        while not all(client.status(job_id).status.is_terminal for job_id in jobs):
            num_copied += 10 * duplicate_message(bare, copies=10)
            time.sleep(0.05)
        assert num_copied >= 100
        check_invariants(client, bare, jobs)
        assert fleet.stop() == [0, 0]
