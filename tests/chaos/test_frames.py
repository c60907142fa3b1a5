"""Frames that are no message of ours: the worker stays up and goes on taking work."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
import redis

from tests.chaos.faults import lanes
from tests.chaos.fleet import running_fleet
from tests.chaos.fuzzed_frames import fuzzed_frames
from tests.chaos.jobs import prompts
from tests.chaos.worker_options import WorkerOptions
from tests.support.frames import FAR_FUTURE, TWENTY_THREE, spoiled, valid_frame
from tests.support.wait_until import wait_until
from worker.broker.messages import MAX_FRAMES
from worker.client import BatchClient
from worker.registry.keys import Keys
from worker.schemas import JobState

FAKE = WorkerOptions(engine={})


@contextmanager
def _undisturbed_worker(client: BatchClient, bare: redis.Redis, redis_url: str, directory: Path) -> Iterator[None]:
    """One worker, which must live through the block, empty every list and then do a job."""
    with running_fleet(redis_url, directory, FAKE) as fleet:
        worker = fleet.start()
        fleet.wait_up(client)
        yield
        wait_until(lambda: not any(bare.llen(lane) for lane in lanes()), timeout_s=30)
        job = client.wait(client.submit(prompts(20)), timeout_s=10)
        assert (job.status, job.request_counts.completed) == (JobState.COMPLETED, 20)
        wait_until(lambda: not bare.exists("unacked", "unacked_index"), timeout_s=10)
        assert not any(bare.llen(lane) for lane in lanes())
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
        for lane in lanes():
            bare.lpush(lane, *frames)
    # An object for a body is a task without arguments to Celery: it fails by itself.
    assert bare.llen(Keys().dead_frames) == (len(frames) - 1) * len(lanes())


@pytest.mark.parametrize("num_fuzzed", [200, pytest.param(1000, marks=pytest.mark.chaos)])
def test_fuzzed_frames_do_not_stop_a_worker(
    client: BatchClient, bare: redis.Redis, redis_url: str, tmp_path: Path, num_fuzzed: int
) -> None:
    frames = fuzzed_frames(valid_frame(client, bare), num_fuzzed)
    assert len(frames) == num_fuzzed
    with _undisturbed_worker(client, bare, redis_url, tmp_path):
        for number, frame in enumerate(frames):
            bare.lpush(lanes()[number % len(lanes())], frame)
    assert num_fuzzed / 2 < bare.llen(Keys().dead_frames) <= MAX_FRAMES
