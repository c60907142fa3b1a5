"""What is wrong in the outbox, or who may not write there, costs no other event, and no job's own."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import redis
from pydantic import SecretStr

from settings import LimitSettings, RedisSettings, Settings
from tests.support.processes import running_thread, wait_until
from tests.support.registry import RecordingAnnouncer, TestRegistry, must_claim, ok
from worker.app import create_app
from worker.broker.messages import MessageEnd
from worker.callbacks.sender import CallbackSender
from worker.client import BatchClient
from worker.registry.callbacks import CallbackKind, CallbackOutbox, TakenCallback
from worker.registry.connect import connect
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.runtime.staged_jobs import StagedJobs
from worker.schemas import BatchError, JobState, SubmitOptions

TASK = "task:shop.on_batch@done"
DENIED = r"(?i)access|permission"
TASKS = LimitSettings(callback_queues="done")
GOOD: dict[str, Any] = dict.fromkeys(("job", "tenant", "tok", "error"), "") | {"to": TASK, "state": "done"}
GOOD |= dict.fromkeys(("at", "n", "ok", "err", "tries"), "0")
ENTRIES: dict[str, Any] = {
    "no-fields": {"tries": "0"},
    "no-text": {**GOOD, "error": b"\xff"},
    "no-number": {**GOOD, "at": "today"},
    "no-tries": {**GOOD, "tries": "many"},
    "all-tries": {**GOOD, "tries": str(2**63 - 1)},
    "no-hash": "text",
    "no id\r\n": {**GOOD},
    "\udcff": {**GOOD},  # the byte ff
}


def _outbox(registry: TestRegistry) -> CallbackOutbox:
    return CallbackOutbox(registry.redis, registry.keys)


def _take(registry: TestRegistry) -> TakenCallback | None:
    return _outbox(registry).take(CallbackKind.TASK, lease_s=30.0, longest_wait_s=3600.0)


def _spoil(registry: TestRegistry, name: str) -> None:
    """Put an entry into the outbox that is none, due before all others."""
    entry, event_id = ENTRIES[name], name.encode(errors="surrogateescape")
    key = f"{registry.keys.callbacks}e:".encode() + event_id
    if isinstance(entry, str):
        registry.redis.set(key, entry)
    else:
        registry.redis.hset(key, mapping=entry)
    registry.redis.zadd(f"{registry.keys.callbacks}task", {event_id: 1})


def _planned(registry: TestRegistry) -> str:
    registry.serve("fake")
    job_id = registry.submit([b'{"prompt": "a"}'], SubmitOptions(on_done=TASK), TASKS)
    leases = registry.leases()
    leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard(range(1))], ageing_s=60.0)
    return job_id


@pytest.mark.parametrize("name", ENTRIES)
def test_what_is_no_event_holds_up_none(registry: TestRegistry, client: BatchClient, name: str) -> None:
    job_id = _planned(registry)
    client.cancel(job_id)
    _spoil(registry, name)
    assert [event.job_id for event in _outbox(registry).events(10) if event.id != "all-tries"] == [job_id]
    taken = _take(registry)
    assert taken is not None
    assert taken.event.job_id == job_id
    assert _take(registry) is None
    assert registry.redis.zrange(f"{registry.keys.callbacks}task", 0, -1) == [taken.event.id.encode()]


def test_a_defect_does_not_end_the_sending(
    registry: TestRegistry, client: BatchClient, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    outbox, take, defects = _outbox(registry), CallbackOutbox.take, ["a defect"]

    def take_or_fail(*arguments: object, **options: object) -> TakenCallback | None:
        if defects:
            raise TypeError(defects.pop())
        return take(outbox, CallbackKind.TASK, lease_s=30.0, longest_wait_s=3600.0)

    monkeypatch.setattr(outbox, "take", take_or_fail)
    client.cancel(_planned(registry))
    settings = Settings(redis=registry.settings, limits=TASKS)
    app = create_app(settings)
    sender = CallbackSender(outbox, app, settings, look_interval_s=0.02)
    with caplog.at_level(logging.ERROR), running_thread(sender.run):
        wait_until(lambda: outbox.events(10) == [])
    app.close()
    assert registry.redis.llen("done") == 1
    assert "a defect" in caplog.text


@contextmanager
def _older_user(registry: TestRegistry, redis_url: str) -> Iterator[str]:
    """The URL of a user whose ACL file was made before there were callbacks."""
    keys = ["millrace:{*}:[^c]*", "millrace", "millrace?*[0-9]", "_kombu*"]
    registry.redis.acl_setuser("older", enabled=True, passwords=["+older"], keys=keys, commands=["+@all"])
    try:
        yield redis_url.replace("redis://", "redis://older:older@")
    finally:
        registry.redis.acl_deluser("older")


def _end_by(registry: TestRegistry, redis_url: str, job_id: str, way: str) -> None:
    with connect(RedisSettings(url=SecretStr(redis_url))) as client:
        leases = TestRegistry(client, registry.keys, registry.settings).leases()
        if way == "cancel":
            with BatchClient(redis_url) as producer:
                producer.cancel(job_id)
        elif way == "fail":
            leases.fail(must_claim(leases, UnitRef.plan(job_id)), "bad lines", [])
        else:
            leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0)])


@pytest.mark.parametrize("way", ["cancel", "put", "fail", "claim"])
def test_who_may_not_write_the_outbox_ends_no_job(registry: TestRegistry, redis_url: str, way: str) -> None:
    job_id = registry.submit([b"{}"], SubmitOptions(on_done=TASK), TASKS) if way == "fail" else _planned(registry)
    unit = UnitRef.plan(job_id) if way == "fail" else UnitRef.shard(job_id, 0)
    if way == "claim":  # all records are there, though the unit was not told so
        registry.redis.hset(registry.keys.records(job_id), "0", "{}")
    with _older_user(registry, redis_url) as url, pytest.raises(redis.ResponseError, match=DENIED):
        _end_by(registry, url, job_id, way)
    assert not registry.status(job_id).status.is_terminal
    assert _outbox(registry).events(10) == []
    registry.redis.hset(registry.keys.unit(unit), mapping={"st": "queued", "lease": 0})  # another's turn
    if way == "claim":
        registry.leases().claim(unit)
    else:
        _end_by(registry, redis_url, job_id, way)
    [event] = _outbox(registry).events(10)
    counters = registry.redis.hgetall(registry.keys.counters)
    assert (event.job_id, counters[b"prompts"], counters[b"jobs"]) == (job_id, b"1" if way == "claim" else b"0", b"0")


def test_a_second_refusal_is_told_if_it_says_something_else(registry: TestRegistry) -> None:
    intake, job_id = registry.intake(limits=TASKS), registry.keys.new_job_id()
    for message, num_events in (("no", 1), ("no", 1), ("never", 2)):
        intake.refuse(job_id, BatchError(code="invalid_request", message=message), "default", on_done=TASK)
        time.sleep(0.002)  # an event's id has milliseconds
        assert len(_outbox(registry).events(10)) == num_events


@pytest.mark.parametrize("on_done", ["task:\ud800@done", "task:a b@done", TASK + "\n"])
def test_a_target_of_no_form_is_refused_and_told_nobody(registry: TestRegistry, on_done: str) -> None:
    job_id = registry.keys.new_job_id()
    registry.redis.hset(registry.keys.lines(job_id), "0", b"{}")
    staged = StagedJobs(registry.intake(limits=TASKS), registry.keys, RecordingAnnouncer())
    assert staged.submit(job_id, 1, {"on_done": on_done}) is MessageEnd.DONE
    assert registry.status(job_id).status is JobState.FAILED
    assert _outbox(registry).events(10) == []
