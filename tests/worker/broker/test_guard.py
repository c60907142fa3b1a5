"""Frames that are no message: the worker stays up, takes the next one, and keeps them to be looked at."""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import Any

from tests.support.frames import FAR_FUTURE, TWENTY_THREE, body, put, spoiled, valid_frame
from tests.support.registry import TestRegistry
from tests.support.wait_until import wait_until
from tests.support.worker_processes import worker_processes
from worker.broker.messages import MAX_FRAME_BYTES, MAX_FRAMES, bury
from worker.client import BatchClient
from worker.schemas import JobState

LANE = "millrace"  # the lane of plans
RAW_FRAMES = [b"7", b'"text"', b"{}", b"\xff\xfe", b"[" * 100_000, b"x" * 100_000]
# What is a task all the same, but names no unit of ours.
MISADDRESSED = [
    put("content-encoding", to="klingon"),
    put("body", to=body([["s0-*"], {}, {}])),
    put("body", to=body([[], {}, {}])),
    put("body", to=body([[["nested"]], {"extra": 1}, {}])),
]
# redis-py refuses to send these; kombu would take its error for a lost connection.
UNSENDABLE_TAGS: list[object] = [[], {}, True, None]
UNSENDABLE = [put("properties", "delivery_tag", to=tag) for tag in UNSENDABLE_TAGS]
# What breaks Celery's code around a task: each would keep one of a worker's six slots for ever.
SLOT_KEEPING = [put("body", to=body([["s0-*"], {}, 7]))] * 8


def test_no_frame_stops_a_worker(client: BatchClient, registry: TestRegistry, redis_url: str, tmp_path: Path) -> None:
    template = valid_frame(client, registry.redis)
    buriable = [*RAW_FRAMES, *TWENTY_THREE.values(), FAR_FUTURE, *UNSENDABLE]
    frames = [
        spoil if isinstance(spoil, bytes) else spoiled(template, spoil, f"frame-{number}")
        for number, spoil in enumerate([*buriable, *MISADDRESSED, *SLOT_KEEPING])
    ]
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
    # An object for a body is a task without arguments to Celery: it fails by itself.
    assert len(buried) == len(buriable) - 1
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
