"""What all tests share: how hypothesis behaves, and one Redis that is empty at the start of each test."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import hypothesis
import pytest
import redis

from tests.support.free_port import free_port
from tests.support.redis_server import private_redis

# No deadline: on two cores that other processes use too, a deadline fails at random.
hypothesis.settings.register_profile("millrace", deadline=None)
hypothesis.settings.load_profile("millrace")


@pytest.fixture(scope="session")
def redis_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the Redis has its socket and its log."""
    return tmp_path_factory.mktemp("redis")


@pytest.fixture(scope="session")
def redis_server_url(redis_directory: Path) -> Iterator[str]:
    with private_redis(redis_directory, port=free_port()) as url:
        yield url


@pytest.fixture
def redis_url(redis_server_url: str) -> str:
    with redis.Redis.from_url(redis_server_url) as client:
        client.flushall()
    return redis_server_url
