"""Configures the Celery app that producers and workers share."""

from __future__ import annotations

import ssl
from collections.abc import Sequence
from typing import Any
from urllib.parse import parse_qsl, urlencode, urlsplit

from celery import Celery

from settings import RedisSettings, Settings
from worker.broker.messages import message_queue
from worker.registry.connect import RedisAddress
from worker.registry.queues import PRIORITY_STEPS, QUEUE, queue_of
from worker.schemas import DEFAULT_PRIORITY

_TRANSPORT = "worker.broker.messages:GuardedTransport"
_SOCKET_TRANSPORT = "worker.broker.messages:GuardedSocketTransport"
# For submit and plan of new jobs, which would wait where shards fill every other thread.
SPARE_THREADS = 2
VISIBILITY_TIMEOUT_S = 3600  # the same for every client of one Redis: the shortest one wins


def create_app(settings: Settings, models: Sequence[str] = ()) -> Celery:
    """A Celery app for this Redis. No task is registered and nothing connects yet.

    `models`: the names of the one that a worker serves, whose shards it gets messages about; none of a producer. A
    message only says "look at this job": the registry is the truth, so there is no result backend, no retry, no
    countdown, and a lost or doubled message does no harm. Raises SettingsError for what RedisAddress refuses.
    """
    app = Celery("millrace", set_as_current=False)
    app.conf.update(
        **_broker(settings.redis),
        # JSON only: nothing in a message is ever run.
        task_serializer="json",
        accept_content=["json"],
        result_backend=None,
        task_ignore_result=True,
        task_store_errors_even_if_ignored=False,
        task_track_started=False,
        # In lanes by priority; a queue mistyped by a producer is an error there.
        task_queues=list({queue_of(model): message_queue(model) for model in ("", *models)}.values()),
        task_default_queue=QUEUE,
        task_create_missing_queues=False,
        task_default_priority=DEFAULT_PRIORITY,
        # A message is acknowledged when its unit is finished, released or another worker's.
        task_acks_late=True,
        task_acks_on_failure_or_timeout=True,  # a failure is in the registry: the message has done its work
        task_reject_on_worker_lost=True,
        # Shards in flight share one engine in this process; a message is taken only for a free thread.
        worker_pool="worker.broker.celery_guards:GuardedPool",
        worker_concurrency=settings.worker.concurrency + SPARE_THREADS,
        worker_prefetch_multiplier=1,
        worker_consumer="worker.broker.celery_guards:GuardedConsumer",
        # Threads cannot be cancelled, and a unit's lease outlives a lost connection.
        worker_cancel_long_running_tasks_on_connection_loss=False,
        worker_enable_remote_control=False,  # anyone who reaches the broker could stop workers
        worker_send_task_events=settings.worker.send_events,
        task_send_sent_event=False,
        worker_hijack_root_logger=False,
        worker_redirect_stdouts=False,
        task_publish_retry=True,
        task_publish_retry_policy={"max_retries": 3, "interval_start": 0.1, "interval_step": 0.3, "interval_max": 1},
    )
    return app


def _broker(redis: RedisSettings) -> dict[str, Any]:
    address = RedisAddress.of(redis)
    return {
        "broker_url": _socket_url(address.url) if address.is_socket else address.url,
        # A frame that is no message must not stop a worker: see GuardedChannel.
        "broker_transport": _SOCKET_TRANSPORT if address.is_socket else _TRANSPORT,
        # Certificates are checked; the URL may say otherwise (ssl_cert_reqs, ssl_ca_certs).
        "broker_use_ssl": _certificate_checks(address) if address.is_tls else None,
        "broker_connection_retry": True,
        "broker_connection_retry_on_startup": True,
        "broker_connection_max_retries": None,  # for ever: the default gives up after 100
        "broker_channel_error_retry": True,  # out of memory, read-only, disk full: they pass
        "broker_connection_timeout": redis.connect_timeout_s,
        "broker_pool_limit": 10,
        "broker_transport_options": {
            "visibility_timeout": VISIBILITY_TIMEOUT_S,
            "unacked_restore_interval": 10,
            "unacked_restore_throttle": 1,
            # A worker that dies while it looks for others' messages keeps them all from looking: 300 s by default.
            "unacked_mutex_expire": 30,
            # Without these a half-open connection is never noticed.
            "socket_timeout": redis.socket_timeout_s,
            "socket_connect_timeout": redis.connect_timeout_s,
            "socket_keepalive": True,
            "health_check_interval": redis.health_check_interval_s,
            "priority_steps": list(PRIORITY_STEPS),
            "queue_order_strategy": "priority",
            "client_name": "millrace",
            "global_keyprefix": "",
        },
    }


def _certificate_checks(address: RedisAddress) -> dict[str, Any]:
    checks: dict[str, Any] = {"ssl_cert_reqs": ssl.CERT_REQUIRED}
    return checks if address.ca_file is None else {**checks, "ssl_ca_certs": str(address.ca_file)}


def _socket_url(url: str) -> str:
    """`unix://[user:password@]/path?db=2` as kombu spells it: the database is its "virtual host"."""
    parts = urlsplit(url)
    query = urlencode([("virtual_host" if name == "db" else name, value) for name, value in parse_qsl(parts.query)])
    return f"socket://{parts.netloc}{parts.path}" + (f"?{query}" if query else "")
