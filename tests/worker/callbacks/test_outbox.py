"""The outbox of callbacks: each end of a job makes its event once, and whoever sends it, it is sent at least once."""

from __future__ import annotations

import json
import threading
from collections.abc import Callable, Iterator, Sized
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import pytest
from celery import Celery
from click.testing import CliRunner, Result
from pydantic import SecretStr
from standardwebhooks import Webhook

from settings import LimitSettings, RedisSettings, Settings
from settings.callbacks import CallbackSettings
from tests.support.http_servers import Receiver, chat_lines, receiving, serving
from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry, forgotten, must_claim, ok
from tests.support.workers import WorkerProcesses
from worker.app import create_app
from worker.callbacks.sender import CallbackSender, kinds_sent_with, wait_before_next_s
from worker.cli.main import cli
from worker.client import BatchClient
from worker.lines.request_line import Endpoint
from worker.registry.callbacks import CallbackKind, CallbackOutbox, TakenCallback
from worker.registry.errors import InvalidOption
from worker.registry.keys import UnitRef
from worker.registry.leases import NewShard
from worker.schemas import JobState, SubmitOptions

SECRET = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"
TASK = "task:shop.on_batch@done"
TASKS = LimitSettings(callback_queues="done")
LEASE_S = 30.0
DEAD_AFTER_2 = CallbackSettings(secret=SecretStr(SECRET), max_tries=2, longest_wait_s=0.1)


def _planned(registry: TestRegistry, num_lines: int = 1, *, on_done: str | None = TASK, **options: Any) -> str:
    """A job of one shard, whose end tells `on_done`."""
    registry.serve("fake")
    checked = SubmitOptions(on_done=on_done, **options)
    job_id = registry.submit([b'{"prompt": "a"}'] * num_lines, checked, TASKS)
    leases = registry.leases()
    leases.planned(must_claim(leases, UnitRef.plan(job_id)), [NewShard(range(num_lines))], ageing_s=60.0)
    return job_id


def _complete(registry: TestRegistry, job_id: str) -> None:
    leases = registry.leases()
    leases.put(must_claim(leases, UnitRef.shard(job_id, 0)), [ok(0)])


def _outbox(registry: TestRegistry) -> CallbackOutbox:
    return CallbackOutbox(registry.redis, registry.keys)


def _taken(registry: TestRegistry) -> TakenCallback:
    taken = _outbox(registry).take(CallbackKind.TASK, lease_s=LEASE_S, longest_wait_s=3600.0)
    assert taken is not None
    return taken


def _let_lease_pass(registry: TestRegistry, event_id: str, kind: str = "task") -> None:
    registry.redis.zadd(f"{registry.keys.callbacks}{kind}", {event_id: 1})


def _cancelled(registry: TestRegistry, client: BatchClient, job_id: str) -> None:
    client.cancel(job_id)


def _expired(registry: TestRegistry, client: BatchClient, job_id: str) -> None:
    registry.expire(job_id)
    registry.redis.delete(registry.keys.served)  # nobody is up, so whoever looks ends it
    client.status(job_id)


ENDS: dict[str, Callable[[TestRegistry, BatchClient, str], None]] = {
    "completed": lambda registry, _client, job_id: _complete(registry, job_id),
    "cancelled": _cancelled,
    "expired": _expired,
}


@pytest.mark.parametrize("state", ENDS)
def test_each_end_of_a_job_makes_its_event(registry: TestRegistry, client: BatchClient, state: str) -> None:
    job_id = _planned(registry, tenant="team-a")
    assert _outbox(registry).events(10) == []
    ENDS[state](registry, client, job_id)
    [event] = _outbox(registry).events(10)
    job = registry.status(job_id)
    assert job.status == state
    assert event.message == {
        "id": event.id,
        "object": "event",
        "created_at": int(job.finished_at or 0),
        "type": f"batch.{state}",
        "data": {
            "id": job_id,
            "request_counts": job.request_counts.model_dump(exclude={"cancelled", "expired"}),
        },
    }
    assert (event.tenant, event.target, event.tries, event.is_dead) == ("team-a", TASK, 0, False)


def test_a_job_refused_by_its_plan_makes_one(registry: TestRegistry) -> None:
    job_id = registry.submit([b"{}"], SubmitOptions(on_done=TASK, strict=True), TASKS)
    leases = registry.leases()
    leases.fail(must_claim(leases, UnitRef.plan(job_id)), "bad lines", [])
    [event] = _outbox(registry).events(10)
    assert (event.message["type"], event.job_id, event.counts["total"]) == ("batch.failed", job_id, 0)


def test_a_job_that_tells_nobody_leaves_nothing(registry: TestRegistry) -> None:
    job_id = _planned(registry, on_done=None)
    _complete(registry, job_id)
    assert registry.status(job_id).status is JobState.COMPLETED
    assert list(registry.redis.scan_iter(f"{registry.keys.callbacks}*")) == []
    assert not registry.redis.hexists(registry.keys.job(job_id), "cb")


def test_workers_of_older_versions_leave_such_a_job_alone(registry: TestRegistry) -> None:
    job_id = registry.submit([b'{"prompt": "a"}'], SubmitOptions(on_done=TASK), TASKS)
    assert registry.redis.hget(registry.keys.job(job_id), "v") == b"4"  # before and after it is planned
    assert registry.redis.hget(registry.keys.job(_planned(registry)), "v") == b"4"
    assert registry.redis.hget(registry.keys.job(_planned(registry, on_done=None)), "v") == b"3"
    responses = registry.submit([b"{}"], SubmitOptions(endpoint=Endpoint.RESPONSES))  # which they do not know either
    assert registry.redis.hget(registry.keys.job(responses), "v") == b"4"


def test_a_job_that_ends_again_after_a_rewind_has_the_same_event(registry: TestRegistry) -> None:
    job_id = _planned(registry)
    with forgotten(registry):
        _complete(registry, job_id)
        [first] = _outbox(registry).events(10)
    _complete(registry, job_id)
    [again] = _outbox(registry).events(10)
    assert again.id == first.id


def test_what_the_limits_do_not_allow_is_not_submitted(registry: TestRegistry, client: BatchClient) -> None:
    with pytest.raises(InvalidOption, match=r"limits\.callback_queues"):
        client.submit([b'{"prompt": "a"}'], on_done=TASK)
    with pytest.raises(InvalidOption, match=r"limits\.callback_hosts"):
        client.submit([b'{"prompt": "a"}'], on_done="https://hooks.example.com/")
    assert registry.jobs() == []
    assert list(registry.redis.scan_iter("*:in*")) == []


def test_a_retried_job_tells_the_same(registry: TestRegistry, redis_url: str) -> None:
    job_id = _planned(registry)
    with BatchClient(redis_url, limits=TASKS) as client:
        client.cancel(job_id)
        again = client.retry(job_id)
    assert registry.redis.hget(registry.keys.job(again), "cb") == TASK.encode()


def test_one_sender_has_an_event_until_its_lease_is_over(registry: TestRegistry) -> None:
    _complete(registry, _planned(registry))
    first = _taken(registry)
    assert _outbox(registry).take(CallbackKind.TASK, lease_s=LEASE_S, longest_wait_s=3600.0) is None
    _let_lease_pass(registry, first.event.id)  # its sender died, or so it seems
    second = _taken(registry)
    assert (second.event.id, second.event.body, second.event.tries) == (first.event.id, first.event.body, 2)
    assert not _outbox(registry).settle(first)  # fenced
    assert not _outbox(registry).settle(first, "it failed", wait_s=1.0)
    assert _outbox(registry).settle(second)
    assert _outbox(registry).events(10) == []
    assert list(registry.redis.scan_iter(f"{registry.keys.callbacks}*")) == []


def test_an_event_put_off_before_redis_clock_went_back_is_due(registry: TestRegistry) -> None:
    _complete(registry, _planned(registry))
    [event] = _outbox(registry).events(10)
    registry.redis.zadd(f"{registry.keys.callbacks}task", {event.id: 4e12})
    assert _taken(registry).event.id == event.id


def test_a_dead_one_is_kept_for_a_week_and_can_be_sent_again(registry: TestRegistry) -> None:
    _complete(registry, _planned(registry))
    outbox = _outbox(registry)
    assert outbox.settle(_taken(registry), "answered 500")
    [event] = outbox.events(10, only_dead=True)
    assert (event.error, event.is_dead, event.tries) == ("answered 500", True, 1)
    for key in (registry.keys.callback(event.id), f"{registry.keys.callbacks}dead"):
        assert 604_000 < registry.redis.ttl(key) <= 604_800
    outbox.retry(event.id)
    assert outbox.events(10, only_dead=True) == []
    assert registry.redis.ttl(registry.keys.callback(event.id)) > 2_591_000  # a month, as that of a new one
    assert _taken(registry).event.tries == 1


def test_waits_double_up_to_the_longest_with_jitter() -> None:
    settings = CallbackSettings()
    assert [wait_before_next_s(tries, settings, 0.5) for tries in (1, 2, 3, 4)] == [5.0, 10.0, 20.0, 40.0]
    assert [wait_before_next_s(19, settings, share) for share in (0.0, 0.5, 1.0)] == [1800.0, 3600.0, 5400.0]
    assert wait_before_next_s(1000, settings, 0.5) == 3600.0


def test_what_a_process_may_not_send_it_does_not_take() -> None:
    secret = CallbackSettings(secret=SecretStr(SECRET))
    hosts = LimitSettings(callback_hosts="a.example")
    assert kinds_sent_with(Settings()) == kinds_sent_with(Settings(limits=hosts)) == ()
    assert kinds_sent_with(Settings(callbacks=secret)) == ()
    assert kinds_sent_with(Settings(limits=hosts, callbacks=secret)) == (CallbackKind.URL,)
    assert kinds_sent_with(Settings(limits=TASKS)) == (CallbackKind.TASK,)


def _limits(receiver: Receiver) -> LimitSettings:
    return LimitSettings(callback_private_hosts=receiver.host)


@contextmanager
def _sending(registry: TestRegistry, limits: LimitSettings, callbacks: CallbackSettings) -> Iterator[None]:
    settings = Settings(redis=registry.settings, limits=limits, callbacks=callbacks)
    app = create_app(settings)
    sender = CallbackSender(_outbox(registry), app, settings, look_interval_s=0.02)
    try:
        with running_thread(sender.run):
            yield
    finally:
        app.close()


def _ended_for(registry: TestRegistry, receiver: Receiver, redis_url: str) -> str:
    """A job that ended as cancelled, by the Python client alone."""
    with BatchClient(redis_url, limits=_limits(receiver)) as client:
        job_id = client.submit([b'{"prompt": "a"}'], on_done=receiver.url)
        assert client.cancel(job_id).status is JobState.CANCELLED
    return job_id


def test_an_event_is_sent_again_under_its_id_until_it_is_taken(registry: TestRegistry, redis_url: str) -> None:
    patient = CallbackSettings(secret=SecretStr(SECRET), longest_wait_s=0.1)
    with receiving(500, 302, 404) as receiver:
        job_id = _ended_for(registry, receiver, redis_url)
        with _sending(registry, _limits(receiver), patient):
            wait_until(lambda: _outbox(registry).events(10) == [])
    assert (len(receiver.ids), len(set(receiver.ids))) == (4, 1)
    assert len({body for _, body in receiver.received}) == 1
    headers, body = receiver.received[-1]
    event = Webhook(SECRET).verify(body, headers)
    assert (event["type"], event["data"]["id"]) == ("batch.cancelled", job_id)


def test_an_event_is_given_up_after_its_tries(registry: TestRegistry, redis_url: str) -> None:
    with receiving(*[500] * 9) as receiver:
        _ended_for(registry, receiver, redis_url)
        with _sending(registry, _limits(receiver), DEAD_AFTER_2):
            wait_until(lambda: _outbox(registry).events(10, only_dead=True))
            assert len(receiver.received) == 2
            [event] = _outbox(registry).events(10)
            assert (event.error, event.tries, event.is_dead) == ("answered 500", 2, True)
            receiver.answers.clear()
            assert _callbacks(redis_url, "retry", event.id).exit_code == 0
            wait_until(lambda: len(receiver.received) == 3)
            wait_until(lambda: _outbox(registry).events(10) == [])
    assert len(set(receiver.ids)) == 1


def test_an_event_whose_senders_die_each_time_is_given_up(registry: TestRegistry, redis_url: str) -> None:
    _complete(registry, _planned(registry))
    for _ in range(2):
        _let_lease_pass(registry, _taken(registry).event.id)
    with _sending(registry, TASKS, DEAD_AFTER_2):
        wait_until(lambda: _outbox(registry).events(10, only_dead=True))
    [event] = _outbox(registry).events(10)
    assert event.error == "whoever sent it died"
    assert registry.redis.llen("done") == 0


def test_a_receiver_that_hangs_holds_up_no_other(registry: TestRegistry, redis_url: str) -> None:
    slow = CallbackSettings(secret=SecretStr(SECRET), timeout_s=60.0)
    with receiving("hang") as hanging, receiving() as other:
        limits = LimitSettings(callback_private_hosts=f"{hanging.host},{other.host}")
        _ended_for(registry, hanging, redis_url)
        with _sending(registry, limits, slow):
            wait_until(lambda: hanging.received)
            job_id = _ended_for(registry, other, redis_url)
            wait_until(lambda: other.received)
            assert json.loads(other.received[0][1])["data"]["id"] == job_id
            hanging.closing.set()  # it dies
            wait_until(lambda: [event.error for event in _outbox(registry).events(10) if event.error])


def test_a_celery_task_is_sent_with_the_event_and_its_id(registry: TestRegistry, redis_url: str) -> None:
    job_id = _planned(registry)
    _complete(registry, job_id)
    called: list[tuple[str, dict[str, Any]]] = []
    app = Celery("shop", broker=redis_url, set_as_current=False)  # a program of somebody else's
    app.conf.update(task_default_queue="done", broker_connection_retry_on_startup=False)
    with _sending(registry, TASKS, CallbackSettings()):
        wait_until(lambda: _outbox(registry).events(10) == [])
    with (
        app.connection_for_read() as connection,
        app.amqp.TaskConsumer(connection.default_channel, queues=[app.amqp.queues["done"]]) as consumer,
    ):

        def on_message(message: Any) -> None:
            (arguments, _, _), headers = message.decode(), message.headers
            called.append((headers["task"], {"id": headers["id"], "event": arguments[0]}))
            message.ack()

        consumer.on_message = on_message
        consumer.callbacks = []
        wait_until(lambda: _drained(connection, called))
    app.close()
    [(task, message)] = called
    assert (task, message["event"]["id"], message["event"]["data"]["id"]) == ("shop.on_batch", message["id"], job_id)


def _drained(connection: Any, called: Sized) -> bool:
    """Whether a message has come."""
    with suppress(TimeoutError):
        connection.drain_events(timeout=0.1)
    return len(called) > 0


def test_a_plain_celery_producer_is_told_of_its_refusal(
    registry: TestRegistry, redis_url: str, workers: WorkerProcesses
) -> None:
    with receiving() as receiver:
        workers.start(limits__callback_private_hosts=receiver.host, callbacks__secret=SECRET)
        app = create_app(Settings(redis=registry.settings))
        kinds: list[dict[str, object]] = [{"priority": 99}, {}, {"on_done": "https://elsewhere.example/"}]
        for number, options in enumerate(kinds):
            job_id = registry.keys.new_job_id()
            if not number:
                first = job_id
            if number == 1:
                registry.redis.hset(registry.keys.lines(job_id), "0", b'{"prompt": "a"}')
                accepted = job_id
            app.send_task(
                "millrace.submit", args=[job_id], kwargs={"n": 1, "on_done": receiver.url, **options}, queue="millrace"
            )
        wait_until(lambda: len(receiver.received) == 2, timeout_s=60)
        wait_until(lambda: len(registry.jobs()) == 3)
        app.close()
        events = {json.loads(body)["data"]["id"]: json.loads(body)["type"] for _, body in receiver.received}
    assert events == {first: "batch.failed", accepted: "batch.completed"}


def test_a_worker_killed_between_close_and_send_loses_nothing(
    registry: TestRegistry, redis_url: str, workers: WorkerProcesses
) -> None:
    with receiving("hang") as receiver:
        limits = _limits(receiver)
        with BatchClient(redis_url, limits=limits) as client:
            silent = workers.start()  # it may send nothing: it dies after the close and before any send
            job_id = client.submit([b'{"prompt": "a"}'], on_done=receiver.url)
            client.wait(job_id, timeout_s=60)
            silent.kill()
            sending = workers.start(limits__callback_private_hosts=receiver.host, callbacks__secret=SECRET)
            wait_until(lambda: receiver.received, timeout_s=60)  # and hangs
            sending.kill()
        [event_id] = receiver.ids
        _let_lease_pass(registry, event_id, "url")
        callbacks = CallbackSettings(secret=SecretStr(SECRET))
        with serving(redis_url, limits=limits, callbacks=callbacks):  # a server sends it
            wait_until(lambda: _outbox(registry).events(10) == [])
        assert receiver.ids == [event_id, event_id]
        assert json.loads(receiver.received[1][1])["data"]["id"] == job_id


def test_a_batch_over_http_tells_whom_its_metadata_names(registry: TestRegistry, redis_url: str) -> None:
    with receiving() as receiver:
        callbacks = CallbackSettings(secret=SecretStr(SECRET))
        with serving(redis_url, limits=_limits(receiver), callbacks=callbacks) as server:
            file_id = server.upload_id(chat_lines("a"))
            refused = server.create(file_id, metadata={"millrace.on_done": "https://elsewhere.example/"})
            assert (refused.status_code, refused.json()["error"]["param"]) == (400, "on_done")
            assert server.create(file_id, on_done=receiver.url).json()["error"]["code"] == "unknown_parameter"
            job_id = server.create(file_id, metadata={"millrace.on_done": receiver.url}).json()["id"]
            assert server.http.post(f"/v1/batches/{job_id}/cancel").status_code == 200
            wait_until(lambda: receiver.received)
        [(headers, body)] = receiver.received
        assert Webhook(SECRET).verify(body, headers)["data"]["id"] == job_id


def _callbacks(redis_url: str, *arguments: str) -> Result:
    return CliRunner().invoke(cli, ["callbacks", *arguments, "--redis-url", redis_url])


def test_the_command_lists_retries_and_drops(registry: TestRegistry, redis_url: str) -> None:
    for _ in range(2):
        _complete(registry, _planned(registry))
    first = _taken(registry)
    assert _outbox(registry).settle(first, "answered 500\x1b[2J")
    [waiting] = [event for event in _outbox(registry).events(10) if not event.is_dead]
    listed = json.loads(_callbacks(redis_url, "list", "--json").output)
    assert [(entry["id"], entry["is_dead"]) for entry in listed] == [(waiting.id, False), (first.event.id, True)]
    shown = _callbacks(redis_url, "list", "--dead").output
    assert (first.event.id in shown, waiting.id in shown, "\x1b" in shown) == (True, False, False)
    assert _callbacks(redis_url, "retry", "--dead").exit_code == 0
    assert _outbox(registry).events(10, only_dead=True) == []
    for entry in (waiting.id, first.event.id):
        assert _callbacks(redis_url, "drop", entry).exit_code == 0
    assert list(registry.redis.scan_iter(f"{registry.keys.callbacks}*")) == []
    for unknown in (waiting.id, "nonsense", "x" * 500):
        failed = _callbacks(redis_url, "drop", unknown)
        assert (failed.exit_code, "no callback" in failed.output) == (1, True)
    assert _callbacks(redis_url, "retry").exit_code == 2


def test_millrace_submit_takes_on_done(registry: TestRegistry, redis_url: str, tmp_path: Path) -> None:
    file = tmp_path / "a.jsonl"
    file.write_bytes(b'{"prompt": "a"}\n')
    options = ["--redis-url", redis_url, "--on-done", TASK]
    refused = CliRunner().invoke(cli, ["submit", str(file), *options])
    assert (refused.exit_code, "limits.callback_queues" in refused.output) == (2, True)
    done = CliRunner().invoke(cli, ["submit", str(file), *options, "--set", "limits.callback_queues=done"])
    assert done.exit_code == 0, done.exception
    assert registry.redis.hget(registry.keys.job(done.stdout.strip()), "cb") == TASK.encode()


def test_senders_stop_while_a_receiver_hangs(registry: TestRegistry, redis_url: str) -> None:
    with receiving("hang") as receiver:
        _ended_for(registry, receiver, redis_url)
        settings = Settings(
            redis=RedisSettings(url=SecretStr(redis_url)),
            limits=_limits(receiver),
            callbacks=CallbackSettings(secret=SecretStr(SECRET), timeout_s=60.0),
        )
        app, stopping = create_app(settings), threading.Event()
        sender = CallbackSender(_outbox(registry), app, settings, look_interval_s=0.02)
        thread = threading.Thread(target=sender.run, args=(stopping,))
        thread.start()
        wait_until(lambda: receiver.received)
        stopping.set()
        thread.join(30)
        assert not thread.is_alive()
        [event] = _outbox(registry).events(10)  # for whoever comes next
        assert event.tries == 1
        receiver.closing.set()
        wait_until(lambda: not [thread for thread in threading.enumerate() if thread.name == "callback"])
        app.close()
