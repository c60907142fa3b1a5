"""What is wrong in the outbox, or who may not write there, costs no other event, and no job's own."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from urllib.parse import urlsplit

import pytest
import redis
from click.testing import CliRunner
from pydantic import SecretStr

from settings import LimitSettings, RedisSettings, Settings
from settings.callbacks import CallbackSettings
from tests.support.http_servers import Receiver, receiving
from tests.support.processes import running_thread, wait_until
from tests.support.registry import RecordingAnnouncer, TestRegistry, must_claim, ok
from worker.app import create_app
from worker.broker.messages import MessageEnd
from worker.callbacks.sender import MAX_SENDING, CallbackSender
from worker.cli.main import cli
from worker.client import BatchClient
from worker.registry.callbacks import CallbackEvent, CallbackKind, CallbackOutbox, TakenCallback
from worker.registry.connect import connect
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.runtime.staged_jobs import StagedJobs
from worker.schemas import BatchError, JobState, SubmitOptions

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TASK = "task:shop.on_batch@done"
DENIED = r"(?i)access|permission"
TASKS = LimitSettings(callback_queues="done")
MONTH_S = 30 * 86_400
GOOD: dict[Any, Any] = dict.fromkeys(("job", "tenant", "tok", "error"), "") | {"to": TASK, "state": "done"}
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


def _id(number: int) -> str:
    return f"evt_s0-00000000-0000-7000-8000-000000000000_{number}"


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
def _sending(registry: TestRegistry, *receivers: Receiver, look_interval_s: float) -> Iterator[None]:
    hosts = ",".join(receiver.host for receiver in receivers)
    limits = LimitSettings(callback_private_hosts=hosts, callback_queues="done")
    callbacks = CallbackSettings(secret=SecretStr(SECRET), timeout_s=60.0)
    settings = Settings(redis=registry.settings, limits=limits, callbacks=callbacks)
    app = create_app(settings)
    sender = CallbackSender(_outbox(registry), app, settings, look_interval_s=look_interval_s)
    try:
        with running_thread(sender.run):
            yield
    finally:
        for receiver in receivers:  # it dies, so what hangs there ends
            receiver.closing.set()
        app.close()


def _cancel_jobs(registry: TestRegistry, client: BatchClient, number: int, target: str, tenant: str) -> None:
    """Jobs that ended and tell `target`, the first to be sent first."""
    limits = LimitSettings(callback_private_hosts=urlsplit(target).netloc) if target != TASK else TASKS
    for _ in range(number):
        client.cancel(registry.submit([b"{}"], SubmitOptions(on_done=target, tenant=tenant), limits))


def test_events_are_sent_as_fast_as_receivers_answer(registry: TestRegistry, client: BatchClient) -> None:
    at_once = MAX_SENDING // 2  # of one tenant
    with receiving() as receiver:
        receiver.together = threading.Barrier(at_once)
        _cancel_jobs(registry, client, 4 * at_once, receiver.url, "a")
        with _sending(registry, receiver, look_interval_s=600.0):  # there is but one look
            wait_until(lambda: _outbox(registry).events(5 * at_once) == [])
    assert len(set(receiver.ids)) == len(receiver.ids) == 4 * at_once


def test_places_that_all_are_left_during_a_look_are_filled_after_it(
    registry: TestRegistry, client: BatchClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    at_once, take = MAX_SENDING // 2, CallbackOutbox.take
    released = threading.Barrier(at_once + 1)

    def take_slowly(outbox: CallbackOutbox, *arguments: Any, **options: Any) -> TakenCallback | None:
        taken = take(outbox, *arguments, **options)
        if options["but_of"]:  # while all of this tenant's are on their way
            released.wait(60)
            receiver.together = None
            wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "callback"])
        return taken

    monkeypatch.setattr(CallbackOutbox, "take", take_slowly)
    with receiving() as receiver:
        receiver.together = released
        _cancel_jobs(registry, client, 2 * at_once, receiver.url, "a")
        with _sending(registry, receiver, look_interval_s=600.0):
            wait_until(lambda: len(receiver.received) == 2 * at_once)


def test_a_tenant_whose_receivers_hang_holds_up_no_other(registry: TestRegistry, client: BatchClient) -> None:
    with receiving(*["hang"] * 300) as hanging, receiving() as other:
        _cancel_jobs(registry, client, 150, hanging.url, "a")
        _cancel_jobs(registry, client, 3, other.url, "b")
        _cancel_jobs(registry, client, 2 * MAX_SENDING, TASK, "a")  # kinds have places of their own
        with _sending(registry, hanging, other, look_interval_s=0.02):
            wait_until(lambda: len(other.received) == 3)
            wait_until(lambda: registry.redis.llen("done") == 2 * MAX_SENDING)
            wait_until(lambda: len(hanging.received) == MAX_SENDING // 2)
            _cancel_jobs(registry, client, 1, other.url, "c")
            wait_until(lambda: len(other.received) == 4)
            assert len(hanging.received) == MAX_SENDING // 2


def test_a_take_looks_behind_a_thousand_events_of_others(registry: TestRegistry, client: BatchClient) -> None:
    _cancel_jobs(registry, client, 2, TASK, "a")
    [first, second] = _outbox(registry).events(2)
    with registry.redis.pipeline() as pipeline:
        for number in range(999):
            pipeline.hset(registry.keys.callback(_id(number)), mapping={**GOOD, "tenant": "b"})
            pipeline.zadd(f"{registry.keys.callbacks}task", {_id(number): 1})
        pipeline.execute()

    def take() -> TakenCallback | None:
        return _outbox(registry).take(CallbackKind.TASK, lease_s=30.0, longest_wait_s=3600.0, but_of=["b", "c"])

    taken = take()
    assert taken is not None
    assert taken.event.id == first.id
    registry.redis.hset(registry.keys.callback(_id(1000)), mapping={**GOOD, "tenant": "c"})
    registry.redis.zadd(f"{registry.keys.callbacks}task", {_id(1000): 2})
    assert take() is None
    assert second.id in {event.id for event in _outbox(registry).events(2000)}


def test_an_event_that_nobody_takes_is_forgotten_in_time(registry: TestRegistry, client: BatchClient) -> None:
    outbox, waiting = _outbox(registry), f"{registry.keys.callbacks}task"
    _cancel_jobs(registry, client, 3, TASK, "a")
    first, second, third = outbox.events(10)
    taken = _take(registry)
    assert taken is not None
    assert taken.event.id == first.id
    registry.redis.persist(registry.keys.callback(first.id))
    outbox.settle(taken, "answered 500", wait_s=60.0)  # each try begins it anew
    for key in (registry.keys.callback(first.id), registry.keys.callback(second.id), waiting):
        assert MONTH_S - 60 < registry.redis.ttl(key) <= MONTH_S
    registry.redis.delete(registry.keys.callback(second.id), registry.keys.callback(third.id))
    _cancel_jobs(registry, client, 1, TASK, "a")
    assert set(registry.redis.zrange(waiting, 0, -1)) == {event.id.encode() for event in outbox.events(10)}


def test_of_ten_thousand_dead_events_the_oldest_goes_whole(registry: TestRegistry, client: BatchClient) -> None:
    dead = f"{registry.keys.callbacks}dead"
    oldest = registry.keys.callback(_id(0))
    registry.redis.hset(oldest, mapping=GOOD)
    now_ms = round(time.time() * 1000)
    registry.redis.zadd(dead, {_id(number): now_ms - 20_000 + number for number in range(10_000)})
    client.cancel(_planned(registry))
    taken = _take(registry)
    assert taken is not None
    assert _outbox(registry).settle(taken, "answered 500")
    assert (registry.redis.zcard(dead), registry.redis.exists(oldest)) == (10_000, 0)
    assert registry.redis.zrank(dead, _id(1)) == 0


def test_retrying_the_dead_skips_those_that_are_gone(
    registry: TestRegistry, client: BatchClient, redis_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    outbox, listed = _outbox(registry), CallbackOutbox.events
    _cancel_jobs(registry, client, 3, TASK, "a")
    for _ in range(3):
        taken = _take(registry)
        assert taken is not None
        outbox.settle(taken, "answered 500")
    gone = outbox.events(10, only_dead=True)[1]

    def listed_before_one_went(*arguments: Any, **options: Any) -> list[CallbackEvent]:
        events = listed(*arguments, **options)
        outbox.drop(gone.id)
        return events

    monkeypatch.setattr(CallbackOutbox, "events", listed_before_one_went)
    done = CliRunner().invoke(cli, ["callbacks", "retry", "--dead", "--redis-url", redis_url])
    assert (done.exit_code, done.stderr) == (0, "2 to be sent\n")
    assert registry.redis.zcard(f"{registry.keys.callbacks}task") == 2
    assert registry.redis.zcard(f"{registry.keys.callbacks}dead") == 0


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
