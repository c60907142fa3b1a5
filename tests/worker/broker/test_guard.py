"""Frames that are no message: the worker stays up, takes the next one, and keeps them to be looked at."""

from __future__ import annotations

import base64
import copy
import json
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any

import pytest

from tests.support.registry import TestRegistry
from tests.support.wait_until import wait_until
from tests.support.worker_processes import worker_processes
from worker.broker.dead_frames import MAX_FRAME_BYTES, MAX_FRAMES, bury
from worker.client import BatchClient
from worker.schemas import JobState

LANE = "millrace"  # the lane of plans
Frame = dict[str, Any]

RAW_FRAMES = [b"not JSON", b"", b"null", b"[]", b"7", b'"text"', b"{}", b"\xff\xfe", b"[" * 100_000, b"x" * 100_000]


def _body(value: object) -> str:
    return base64.b64encode(json.dumps(value).encode()).decode()


def _set(*path: str, to: object) -> Callable[[Frame], None]:
    def change(frame: Frame) -> None:
        target = frame
        for name in path[:-1]:
            target = target[name]
        target[path[-1]] = to

    return change


def _drop(*path: str) -> Callable[[Frame], None]:
    def change(frame: Frame) -> None:
        target = frame
        for name in path[:-1]:
            target = target[name]
        del target[path[-1]]

    return change


# What kombu or Celery cannot take apart.
MALFORMED = [
    _drop("body"),
    _set("body", to="*** not base64 ***"),
    _set("body", to=_body([[], {}])),
    _drop("properties"),
    _drop("properties", "delivery_tag"),
    _drop("properties", "delivery_info"),
    _set("properties", to=None),
    _set("properties", "body_encoding", to="rot13"),
    _drop("headers"),
    _set("headers", to=[]),
    _drop("headers", "id"),
    _drop("headers", "task"),
    _set("headers", "eta", to="yesterday"),
]
# What is well-formed, but no task.
STRANGE = [
    _set("body", to="bm90IEpTT04="),
    _set("body", to=base64.b64encode(b"[" * 200_000).decode()),
    _set("headers", "task", to="os.system"),
    _set("content-type", to="application/x-python-serialize"),
]
# What is a task all the same, but names no unit of ours.
MISADDRESSED = [
    _set("content-encoding", to="klingon"),
    _set("body", to=_body({"args": []})),
    _set("body", to=_body([["s0-*"], {}, {}])),
    _set("body", to=_body([[], {}, {}])),
    _set("body", to=_body([[["nested"]], {"extra": 1}, {}])),
]


@pytest.fixture
def client(redis_url: str) -> Iterator[BatchClient]:
    with BatchClient(redis_url) as client:
        yield client


def _template(client: BatchClient, registry: TestRegistry) -> Frame:
    client.submit([b"{}"])
    frame: Frame = json.loads(registry.redis.lrange(LANE, 0, 0)[0])
    registry.redis.flushall()
    return frame


def test_no_frame_stops_a_worker(client: BatchClient, registry: TestRegistry, redis_url: str, tmp_path: Path) -> None:
    template = _template(client, registry)
    frames = list(RAW_FRAMES)
    for number, change in enumerate([*MALFORMED, *STRANGE, *MISADDRESSED]):
        frame = copy.deepcopy(template)
        frame["properties"]["delivery_tag"] = frame["headers"]["id"] = f"frame-{number}"
        change(frame)
        frames.append(json.dumps(frame).encode())
    with worker_processes(redis_url, tmp_path) as workers:
        worker = workers.start()
        for frame_bytes in frames:
            registry.redis.lpush(LANE, frame_bytes)
        job = client.wait(client.submit([{"prompt": "still there?"}]), timeout_s=20)
        assert job.status is JobState.COMPLETED
        assert worker.poll() is None
        wait_until(lambda: registry.redis.llen(LANE) == 0)
        wait_until(lambda: not registry.redis.exists("unacked"))
        log = workers.log()
    buried = registry.redis.lrange(registry.keys.dead_frames, 0, -1)
    assert len(buried) == len(RAW_FRAMES) + len(MALFORMED) + len(STRANGE)
    assert b"not JSON" in buried
    assert max(map(len, buried)) == MAX_FRAME_BYTES
    assert "Restoring" not in log
    assert "Connection to broker lost" not in log


def test_the_dead_list_is_bounded(registry: TestRegistry) -> None:
    class Channel:
        def conn_or_acquire(self) -> Any:
            return nullcontext(registry.redis)

    for number in range(MAX_FRAMES + 5):
        bury(Channel(), f"frame {number}")
    assert registry.redis.llen(registry.keys.dead_frames) == MAX_FRAMES
    assert registry.redis.lindex(registry.keys.dead_frames, 0) == b"frame 1004"
