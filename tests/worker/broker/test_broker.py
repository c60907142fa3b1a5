"""Celery's edge: frames that are no message are kept to be looked at, and the events that Flower shows."""

from __future__ import annotations

import base64
import json
import uuid
import zlib
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import redis
from celery import Celery
from kombu import Message
from pydantic import SecretStr

from settings import RedisSettings, Settings
from tests.chaos.frames import FAR_FUTURE, TWENTY_THREE, body, encoded, put, spoiled, valid_frame
from tests.support.processes import wait_until
from tests.support.registry import TestRegistry, running_units
from tests.support.workers import FAKE_WORKER_STOP_TIMEOUT_S, worker_processes
from worker.app import create_app
from worker.broker.celery_guards import InterruptibleRequest, send_first_event
from worker.broker.messages import (
    FRAMES_TTL_S,
    MAX_FRAME_BYTES,
    MAX_FRAMES,
    MAX_MESSAGE_BYTES,
    RUN_SHARD_TASK,
    Announcer,
    GuardedChannel,
    MessageEnd,
    bury,
)
from worker.client import BatchClient
from worker.registry.keys import UnitRef
from worker.registry.queues import queue_of
from worker.runtime.held_units import HeldUnit
from worker.runtime.runtime import WorkerRuntime
from worker.runtime.unit_runner import UnitRunner
from worker.schemas import JobState
from worker.tasks import register_tasks

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


def _compress(frame: dict[str, Any]) -> None:
    """As Celery does: it would be unpacked and run."""
    frame["body"] = encoded(zlib.compress(base64.b64decode(frame["body"])))
    frame["headers"]["compression"] = "application/x-gzip"


# Messages but for what they would be unpacked to, or for their size.
UNPACKABLE = [_compress, put("headers", "argsrepr", to="A" * MAX_MESSAGE_BYTES)]

CHANNELS = "/0.celeryev/*"


def test_no_frame_stops_a_worker(client: BatchClient, registry: TestRegistry, redis_url: str, tmp_path: Path) -> None:
    template = valid_frame(client, registry.redis)
    buriable = [*RAW_FRAMES, *TWENTY_THREE.values(), FAR_FUTURE, *UNSENDABLE, *UNPACKABLE]
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


def test_a_text_that_speaks_of_compression_is_a_message_all_the_same(
    client: BatchClient, registry: TestRegistry, redis_url: str, tmp_path: Path
) -> None:
    metadata = {'"compression"': '{"compression": "gzip"}'}
    app = create_app(Settings(redis=registry.settings))
    with worker_processes(redis_url, tmp_path) as workers:
        workers.start()
        job_id = registry.keys.new_job_id()
        registry.intake().stage(job_id, 0, [b'{"prompt": "a"}'])
        app.send_task("millrace.submit", args=[job_id, 1], kwargs={"metadata": metadata})
        wait_until(lambda: registry.redis.hget(registry.keys.job(job_id), "st") == b"done")
    assert client.status(job_id).metadata == metadata


def test_a_reset_while_a_queue_is_declared_costs_no_message(
    registry: TestRegistry, monkeypatch: pytest.MonkeyPatch
) -> None:
    resets = [redis.ConnectionError("reset")]
    bind = GuardedChannel.queue_bind

    def bind_or_reset(channel: GuardedChannel, *arguments: Any, **options: Any) -> None:
        if resets:
            raise resets.pop()
        bind(channel, *arguments, **options)

    monkeypatch.setattr(GuardedChannel, "queue_bind", bind_or_reset)
    announcer = Announcer(create_app(Settings(redis=registry.settings)))
    announcer.announce(UnitRef.shard("s0-1", 0), 0, "declared-anew")
    assert not resets
    assert registry.redis.llen(queue_of("declared-anew")) == 1


def test_the_dead_list_is_bounded(registry: TestRegistry) -> None:
    class Channel:
        def conn_or_acquire(self) -> Any:
            return nullcontext(registry.redis)

    for number in range(MAX_FRAMES + 5):
        bury(Channel(), f"frame {number}")
    assert registry.redis.llen(registry.keys.dead_frames) == MAX_FRAMES
    assert registry.redis.lindex(registry.keys.dead_frames, 0) == b"frame 1004"
    assert 0 < registry.redis.ttl(registry.keys.dead_frames) <= FRAMES_TTL_S


@pytest.fixture
def events(redis_url: str) -> Iterator[list[dict[str, Any]]]:
    """What has been heard so far."""
    heard: list[dict[str, Any]] = []

    def take(message: dict[str, Any]) -> None:
        body = json.loads(base64.b64decode(json.loads(message["data"])["body"]))
        heard.extend(body if isinstance(body, list) else [body])

    with redis.Redis.from_url(redis_url) as client, client.pubsub() as listener:
        listener.psubscribe(**{CHANNELS: take})
        thread = listener.run_in_thread(sleep_time=0.05, daemon=True)
        yield heard
        thread.stop()
        thread.join()


class _FailingRuntime:
    """Runs shards, over each of which something is raised that says what the user wrote."""

    def __init__(self, runner: UnitRunner) -> None:
        self._runner = runner

    def run_shard(self, message_id: str, job_id: str, number: int) -> MessageEnd:
        return self._runner.run(UnitRef.shard(job_id, number), message_id, self._fail)

    def _fail(self, _held: HeldUnit) -> None:
        raise ValueError("a secret")


def _types(events: list[dict[str, Any]]) -> set[str]:
    return {event["type"] for event in events}


def _submit_with_plain_celery(redis_url: str) -> None:
    job_id = f"s0-{uuid.uuid4()}"
    with redis.Redis.from_url(redis_url) as plain, Celery(broker=redis_url, set_as_current=False) as producer:
        plain.hset(f"millrace:{{s0}}:j:{job_id}:in", "0", '{"prompt": "a secret"}')
        options = {"n": 1, "metadata": {"note": "a secret"}, "idempotency_key": "a secret"}
        producer.send_task("millrace.submit", args=[job_id], kwargs=options, queue="millrace")


def test_events_say_that_a_worker_lives_and_how_shards_end_without_prompts(
    redis_url: str, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    with worker_processes(redis_url, tmp_path) as workers, BatchClient(redis_url) as client:
        _submit_with_plain_celery(redis_url)
        process = workers.start(worker__send_events="true")
        client.wait(client.submit([{"prompt": "a secret"}] * 25), timeout_s=30.0)
        wait_until(lambda: len([e for e in events if e["type"] == "task-succeeded"]) >= 6)
        process.terminate()
        process.wait(FAKE_WORKER_STOP_TIMEOUT_S)
        wait_until(lambda: events[-1]["type"] == "worker-offline")

    received = [event["name"] for event in events if event["type"] == "task-received"]
    times = Counter(received)  # or more: a message may come twice
    assert times.keys() == {"millrace.plan", "millrace.run_shard"}
    assert times["millrace.plan"] >= 2
    assert times["millrace.run_shard"] >= 4
    assert _types(events) >= {"worker-online", "task-received", "task-started", "task-succeeded"}
    assert "secret" not in json.dumps(events)


def test_a_unit_that_fails_is_told_of_by_the_type_of_its_error_alone(registry: TestRegistry) -> None:
    shard = UnitRef.shard(registry.running_job([0]), 0)
    events = Mock(enabled=True)

    with running_units(registry) as units:
        app = create_app(Settings())
        register_tasks(app, cast(WorkerRuntime, _FailingRuntime(units.runner())))
        sent = app.amqp.as_task_v2("m", RUN_SHARD_TASK, args=(shard.job_id, 0))
        message = Message(headers=sent.headers)
        request = InterruptibleRequest(message, app=app, eventer=events, body=sent.body, decoded=True)
        request.on_failure(request.execute())

    [kind], fields = events.send.call_args
    assert (kind, fields["exception"]) == ("task-failed", "UnitFailed('ValueError')")
    assert "in run_shard" in fields["traceback"]
    assert "secret" not in str(events.send.call_args_list)


def test_a_user_who_may_not_send_events_is_refused_before_any_work(
    redis_url: str, events: list[dict[str, Any]]
) -> None:
    app = create_app(Settings(redis=RedisSettings(url=SecretStr(redis_url))))
    send_first_event(app, "millrace@here")
    wait_until(lambda: _types(events) == {"worker-online"})

    with redis.Redis.from_url(redis_url) as client:
        client.acl_setuser("old", enabled=True, nopass=True, categories=["+@all"], keys=["*"], reset_channels=True)
        try:
            denied = RedisSettings(url=SecretStr(redis_url.replace("redis://", "redis://old:any@")))
            with pytest.raises(redis.exceptions.NoPermissionError):
                send_first_event(create_app(Settings(redis=denied)), "millrace@here")
        finally:
            client.acl_deluser("old")
