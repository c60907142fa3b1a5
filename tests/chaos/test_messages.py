"""Messages that get lost, arrive ten times, or are not ours: they are hints, the registry has the truth."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import cycle
from pathlib import Path
from typing import Any

import pytest
import redis
from celery import Celery
from kombu.exceptions import OperationalError

from tests.chaos.faults import duplicate_message, lanes, steal_message
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.frames import FAR_FUTURE, TWENTY_THREE, fuzzed_frames, spoiled, valid_frame
from tests.chaos.jobs import check_invariants, prompts, submit_jobs, wait_all
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from worker.broker.messages import MAX_FRAMES
from worker.client import BatchClient
from worker.registry.keys import Keys
from worker.schemas import JobState

FAKE = WorkerOptions(engine={})


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
        patch.setattr(Celery, "send_task", fail)
        jobs = submit_jobs(client, num_jobs=1, num_prompts=20)
    assert not any(bare.llen(lane) for lane in lanes(bare))
    fleet.start()
    wait_all(client, jobs)
    check_invariants(client, bare, jobs)


@pytest.mark.chaos
def test_ten_copies_of_every_message_give_one_record_a_prompt(
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


@contextmanager
def _undisturbed_worker(client: BatchClient, bare: redis.Redis, redis_url: str, directory: Path) -> Iterator[None]:
    """A worker that must survive the block, empty every list and then do a job."""
    with running_fleet(redis_url, directory, FAKE) as fleet:
        worker = fleet.start()
        fleet.wait_up(client)
        yield
        wait_until(lambda: not any(bare.llen(lane) for lane in lanes(bare)), timeout_s=30)
        job = client.wait(client.submit(prompts(20)), timeout_s=60)
        assert (job.status, job.request_counts.completed) == (JobState.COMPLETED, 20)
        wait_until(lambda: not bare.exists("unacked", "unacked_index"))
        assert not any(bare.llen(lane) for lane in lanes(bare))
        assert (worker.num_lives, worker.exit_codes) == (1, [])
        assert "Connection to broker lost" not in worker.log
        assert fleet.stop() == [0]


def test_each_of_the_23_frames_that_stop_a_stock_worker_is_buried(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path
) -> None:
    template = valid_frame(client, bare)
    frames = [
        spoil if isinstance(spoil, bytes) else spoiled(template, spoil, f"frame-{number}")
        for number, spoil in enumerate([*TWENTY_THREE.values(), FAR_FUTURE])
    ]
    with _undisturbed_worker(client, bare, redis_url, tmp_path):
        for lane in lanes(bare):
            bare.lpush(lane, *frames)
    # Celery takes an object for a body as a task without arguments, which fails by itself.
    assert bare.llen(Keys().dead_frames) == (len(frames) - 1) * len(lanes(bare))


@pytest.mark.parametrize("num_fuzzed", [200, pytest.param(1000, marks=pytest.mark.chaos)])
def test_fuzzed_frames_do_not_stop_a_worker(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path, num_fuzzed: int
) -> None:
    frames = fuzzed_frames(valid_frame(client, bare), num_fuzzed)
    assert len(frames) == num_fuzzed
    with _undisturbed_worker(client, bare, redis_url, tmp_path):
        for frame, lane in zip(frames, cycle(lanes(bare)), strict=False):
            bare.lpush(lane, frame)
    assert num_fuzzed / 2 < bare.llen(Keys().dead_frames) <= MAX_FRAMES
