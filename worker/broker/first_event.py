"""The first of a worker's events, which must arrive."""

from __future__ import annotations

from celery import Celery


def send_first_event(app: Celery, hostname: str) -> None:
    """Say that this worker is there. Raises redis.RedisError where Redis does not take it.

    Of events that cannot be sent Celery says nothing: it keeps them, all of them, and tries again. So a Redis user that
    lacks PUBLISH (an ACL file of before there were events) is found here.
    """
    with (
        app.connection_for_write() as connection,
        app.events.Dispatcher(connection, hostname=hostname, buffer_while_offline=False) as dispatcher,
    ):
        dispatcher.send("worker-online")
