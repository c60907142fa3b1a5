from __future__ import annotations

import ssl

import pytest
from pydantic import SecretStr

from settings import RedisSettings, Settings, WorkerSettings
from worker.app import SPARE_THREADS, create_app
from worker.broker.queue_lanes import PRIORITY_STEPS, QUEUE


def _settings(url: str) -> Settings:
    return Settings(redis=RedisSettings(url=SecretStr(url)), worker=WorkerSettings(concurrency=3))


def test_making_an_app_connects_to_nothing_and_is_nobodys_current_app() -> None:
    app = create_app(_settings("redis://127.0.0.1:1/0"))
    assert "millrace.plan" not in app.tasks
    assert app.conf.worker_concurrency == 3 + SPARE_THREADS
    assert (app.conf.worker_pool, app.conf.task_acks_late, app.conf.worker_prefetch_multiplier) == ("threads", True, 1)
    assert app.conf.result_backend is None
    assert list(app.conf.accept_content) == ["json"]


def test_lanes_and_queue_are_those_the_reaper_looks_at() -> None:
    app = create_app(_settings("redis://127.0.0.1:1/0"))
    assert app.conf.broker_transport_options["priority_steps"] == list(PRIORITY_STEPS)
    assert [queue.name for queue in app.conf.task_queues] == [QUEUE]


def test_a_broker_connection_never_waits_for_ever() -> None:
    options = create_app(_settings("redis://127.0.0.1:1/0")).conf.broker_transport_options
    assert (options["socket_timeout"], options["socket_connect_timeout"]) == (10.0, 5.0)


@pytest.mark.parametrize(
    ("url", "expected"),
    [
        ("redis://user:pw@host:1234/3", ("host", 1234, "3", "user", "pw", None)),
        ("rediss://:pw@host/1", ("host", 6379, "1", None, "pw", {"ssl_cert_reqs": ssl.CERT_REQUIRED})),
        ("rediss://host/0?ssl_cert_reqs=none", ("host", 6379, "0", None, None, {"ssl_cert_reqs": ssl.CERT_NONE})),
    ],
)
def test_the_broker_is_the_redis_of_the_settings(url: str, expected: tuple[object, ...]) -> None:
    connection = create_app(_settings(url)).connection_for_read()
    assert connection.transport_cls == "worker.broker.guarded_transport:GuardedTransport"
    port = connection.port or 6379
    found = (connection.hostname, port, connection.virtual_host, connection.userid, connection.password)
    assert (*found, connection.ssl) == expected
