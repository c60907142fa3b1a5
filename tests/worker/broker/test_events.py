"""Celery's events, which Flower shows."""

from __future__ import annotations

import base64
import json
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest.mock import Mock

import pytest
import redis
from celery import Celery
from kombu import Message
from pydantic import SecretStr

from settings import RedisSettings, Settings
from tests.support.registry import TestRegistry
from tests.support.units import running_units
from tests.support.wait_until import wait_until
from tests.support.worker_processes import worker_processes
from worker.app import create_app
from worker.broker.celery_guards import InterruptibleRequest, send_first_event
from worker.broker.messages import RUN_SHARD_TASK, MessageEnd
from worker.client import BatchClient
from worker.registry.keys import UnitRef
from worker.runtime.held_units import HeldUnit
from worker.runtime.runtime import WorkerRuntime
from worker.runtime.unit_runner import UnitRunner
from worker.tasks import register_tasks

CHANNELS = "/0.celeryev/*"


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


def test_a_worker_that_sends_events_says_that_it_lives_and_what_becomes_of_each_shard_but_nobodys_words(
    redis_url: str, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    with worker_processes(redis_url, tmp_path) as workers, BatchClient(redis_url) as client:
        _submit_with_plain_celery(redis_url)
        process = workers.start(worker__send_events="true")
        client.wait(client.submit([{"prompt": "a secret"}] * 25), timeout_s=30.0)
        wait_until(lambda: len([e for e in events if e["type"] == "task-succeeded"]) >= 6, timeout_s=10.0)
        process.terminate()
        process.wait(10)
        wait_until(lambda: events[-1]["type"] == "worker-offline")

    received = [event["name"] for event in events if event["type"] == "task-received"]
    assert sorted(received) == ["millrace.plan"] * 2 + ["millrace.run_shard"] * 4
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


def test_a_user_who_may_not_send_events_is_found_out_before_any_work_is_taken(
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
