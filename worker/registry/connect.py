"""A connection to the registry's Redis."""

from __future__ import annotations

import redis
from redis.backoff import ExponentialWithJitterBackoff
from redis.retry import Retry

from settings import RedisSettings

# Six tries over about three seconds: outlives a dropped connection, not a Redis that is down.
_NUM_RETRIES = 6
_RETRY_BASE_S = 0.05
_RETRY_CAP_S = 1.0


def connect(settings: RedisSettings) -> redis.Redis:
    """A client that may be shared by threads; it connects when first used. Replies are bytes."""
    url = settings.url.get_secret_value()
    # A Unix socket takes neither.
    tcp_only = (
        {}
        if url.startswith("unix:")
        else {"socket_keepalive": True, "socket_connect_timeout": settings.connect_timeout_s}
    )
    return redis.Redis.from_url(
        url,
        socket_timeout=settings.socket_timeout_s,
        health_check_interval=settings.health_check_interval_s,
        retry=Retry(ExponentialWithJitterBackoff(base=_RETRY_BASE_S, cap=_RETRY_CAP_S), _NUM_RETRIES),
        decode_responses=False,
        client_name="millrace",
        **tcp_only,
    )
