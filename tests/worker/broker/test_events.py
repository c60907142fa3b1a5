"""Celery's events, which Flower shows."""

from __future__ import annotations

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from settings import RedisSettings, Settings
from tests.support.wait_until import wait_until
from tests.support.worker_processes import worker_processes
from worker.app import create_app
from worker.broker.first_event import send_first_event
from worker.client import BatchClient

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


def _types(events: list[dict[str, Any]]) -> set[str]:
    return {event["type"] for event in events}


def test_a_worker_that_sends_events_says_that_it_lives_and_what_becomes_of_each_shard_but_no_prompt(
    redis_url: str, events: list[dict[str, Any]], tmp_path: Path
) -> None:
    with worker_processes(redis_url, tmp_path) as workers, BatchClient(redis_url) as client:
        process = workers.start(worker__send_events="true")
        client.wait(client.submit([{"prompt": "a secret"}] * 25), timeout_s=30.0)
        wait_until(lambda: len([e for e in events if e["type"] == "task-succeeded"]) == 4, timeout_s=10.0)
        process.terminate()
        process.wait(10)
        wait_until(lambda: events[-1]["type"] == "worker-offline")

    received = [event["name"] for event in events if event["type"] == "task-received"]
    assert sorted(received) == ["millrace.plan"] + ["millrace.run_shard"] * 3
    assert _types(events) >= {"worker-online", "task-received", "task-started", "task-succeeded"}
    assert "secret" not in json.dumps(events)


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
