"""A connection to the registry's Redis."""

from __future__ import annotations

from typing import Any

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.backoff import ExponentialWithJitterBackoff

from settings import RedisSettings
from worker.registry.async_patient_retry import AsyncPatientRetry
from worker.registry.patient_retry import PatientRetry
from worker.registry.redis_address import RedisAddress

# Six tries over about three seconds: outlives a dropped connection, not a Redis that is down.
_NUM_RETRIES = 6
_RETRY_BASE_S = 0.05
_RETRY_CAP_S = 1.0


def connect(settings: RedisSettings) -> redis.Redis:
    """A client that may be shared by threads; it connects when first used. Replies are bytes.

    Raises SettingsError for what RedisAddress refuses.
    """
    address = RedisAddress.of(settings)
    return redis.Redis.from_url(
        address.url, decode_responses=False, retry=PatientRetry(_backoff(), _NUM_RETRIES), **_options(settings, address)
    )


def connect_async(settings: RedisSettings) -> AsyncRedis:
    """`connect` for one event loop, the one it is first used in."""
    address = RedisAddress.of(settings)
    return AsyncRedis.from_url(
        address.url,
        decode_responses=False,
        retry=AsyncPatientRetry(_backoff(), _NUM_RETRIES),
        **_options(settings, address),
    )


def _backoff() -> ExponentialWithJitterBackoff:
    return ExponentialWithJitterBackoff(base=_RETRY_BASE_S, cap=_RETRY_CAP_S)


def _options(settings: RedisSettings, address: RedisAddress) -> dict[str, Any]:
    # A Unix socket takes neither.
    options: dict[str, Any] = (
        {} if address.is_socket else {"socket_keepalive": True, "socket_connect_timeout": settings.connect_timeout_s}
    )
    if address.ca_file is not None:
        options["ssl_ca_certs"] = str(address.ca_file)
    options["socket_timeout"] = settings.socket_timeout_s
    options["health_check_interval"] = settings.health_check_interval_s
    options["client_name"] = "millrace"
    return options
