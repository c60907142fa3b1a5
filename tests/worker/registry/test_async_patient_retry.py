from __future__ import annotations

import asyncio

import pytest
import redis
from redis.backoff import NoBackoff

from worker.registry.connect import AsyncPatientRetry

RETRIES = 3


def num_tries(error: Exception) -> int:
    tries = 0

    async def fail() -> None:
        nonlocal tries
        tries += 1
        raise error

    async def disconnect(_: Exception) -> None:
        pass

    with pytest.raises(type(error)):
        asyncio.run(AsyncPatientRetry(NoBackoff(), RETRIES).call_with_retry(fail, disconnect))
    return tries


def test_a_lost_connection_is_tried_again_and_a_wrong_password_is_final() -> None:
    assert num_tries(redis.ConnectionError("lost")) == 1 + RETRIES
    assert num_tries(redis.AuthenticationError("invalid username-password pair")) == 1
