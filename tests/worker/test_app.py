"""The Celery application and its tasks."""

from __future__ import annotations

import pickle
import ssl
from pathlib import Path
from typing import cast

import pytest
import trustme
from celery.exceptions import Reject
from kombu.exceptions import ContentDisallowed
from kombu.serialization import loads, prepare_accept_content
from pydantic import SecretStr

from settings import RedisSettings, Settings, SettingsError, WorkerSettings
from worker.app import SPARE_THREADS, create_app
from worker.broker.messages import MessageEnd
from worker.registry.queues import PRIORITY_STEPS, QUEUE
from worker.runtime.runtime import WorkerRuntime
from worker.tasks import register_tasks

CALLS = [("millrace.submit", ("job", 1)), ("millrace.plan", ("job",)), ("millrace.run_shard", ("job", 0))]


def _settings(url: str) -> Settings:
    return Settings(redis=RedisSettings(url=SecretStr(url)), worker=WorkerSettings(concurrency=3))


def test_making_an_app_connects_to_nothing_and_is_nobodys_current_app() -> None:
    app = create_app(_settings("redis://127.0.0.1:1/0"))
    assert "millrace.plan" not in app.tasks
    assert app.conf.worker_concurrency == 3 + SPARE_THREADS
    assert app.conf.worker_pool == "worker.broker.celery_guards:GuardedPool"  # of threads
    assert (app.conf.task_acks_late, app.conf.worker_prefetch_multiplier) == (True, 1)
    assert app.conf.result_backend is None


def test_a_message_runs_nothing_and_the_broker_stops_no_worker() -> None:
    conf = create_app(_settings("redis://127.0.0.1:1/0")).conf
    assert (list(conf.accept_content), conf.task_serializer) == (["json"], "json")
    assert (conf.result_backend, conf.task_ignore_result) == (None, True)
    assert (conf.worker_enable_remote_control, conf.worker_send_task_events) == (False, False)


@pytest.mark.parametrize("content_type", ["pickle", "yaml", "application/x-python-serialize"])
def test_a_pickled_message_is_not_even_decoded(content_type: str) -> None:
    app = create_app(_settings("redis://127.0.0.1:1/0"))
    with pytest.raises(ContentDisallowed):
        loads(pickle.dumps([]), content_type, "binary", accept=prepare_accept_content(app.conf.accept_content))


def test_certificates_are_checked_against_the_ca_of_the_settings(tmp_path: Path) -> None:
    file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(file))
    redis = RedisSettings(url=SecretStr("rediss://:pw@host/1"), ca_file=file)
    connection = create_app(Settings(redis=redis)).connection_for_read()
    assert connection.ssl == {"ssl_cert_reqs": ssl.CERT_REQUIRED, "ssl_ca_certs": str(file)}


def test_another_machines_redis_without_a_password_is_refused() -> None:
    with pytest.raises(SettingsError, match=r"^redis\.url=redis://host/0: on another machine and without a password"):
        create_app(_settings("redis://host/0"))


def test_lanes_and_queue_are_those_the_reaper_looks_at() -> None:
    app = create_app(_settings("redis://127.0.0.1:1/0"))
    assert app.conf.broker_transport_options["priority_steps"] == list(PRIORITY_STEPS)
    assert [queue.name for queue in app.conf.task_queues] == [QUEUE]


def test_a_worker_takes_messages_of_plans_and_of_its_models_names() -> None:
    app = create_app(_settings("redis://127.0.0.1:1/0"), ["bge-small", "gpt-4o-mini"])
    assert [queue.name for queue in app.conf.task_queues] == [QUEUE, "millrace.bge-small", "millrace.gpt-4o-mini"]


def test_a_broker_connection_never_waits_for_ever() -> None:
    options = create_app(_settings("redis://127.0.0.1:1/0")).conf.broker_transport_options
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (10.0, 5.0)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://user:pw@host:1234/3", ("host", 1234, "3", "user", "pw", None)),
        ("rediss://:pw@host/1", ("host", 6379, "1", None, "pw", {"ssl_cert_reqs": ssl.CERT_REQUIRED})),
        ("rediss://:pw@host/0?ssl_cert_reqs=none", ("host", 6379, "0", None, "pw", {"ssl_cert_reqs": ssl.CERT_NONE})),
    ],
)
def test_the_broker_is_the_redis_of_the_settings(url: str, expected: tuple[object, ...]) -> None:
    connection = create_app(_settings(url)).connection_for_read()
    assert connection.transport_cls == "worker.broker.messages:GuardedTransport"
    port = connection.port or 6379
    found = (connection.hostname, port, connection.virtual_host, connection.userid, connection.password)
    assert (*found, connection.ssl) == expected


class _Runtime:
    """Ends every message in the same way."""

    def __init__(self, end: MessageEnd) -> None:
        self._end = end

    def submit(self, *_: object) -> MessageEnd:
        return self._end

    def plan(self, *_: object) -> MessageEnd:
        return self._end

    def run_shard(self, *_: object) -> MessageEnd:
        return self._end


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_a_message_goes_back_if_the_runtime_says_so(name: str, arguments: tuple[object, ...]) -> None:
    app = create_app(Settings())
    register_tasks(app, cast(WorkerRuntime, _Runtime(MessageEnd.REQUEUE)))
    with pytest.raises(Reject) as caught:
        app.tasks[name](*arguments)
    assert caught.value.requeue


@pytest.mark.parametrize(("name", "arguments"), CALLS)
def test_a_message_that_is_done_is_acknowledged(name: str, arguments: tuple[object, ...]) -> None:
    app = create_app(Settings())
    register_tasks(app, cast(WorkerRuntime, _Runtime(MessageEnd.DONE)))
    assert app.tasks[name](*arguments) is None
