"""One Redis for the tests of the worker, empty at the start of each."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.support.free_port import free_port
from tests.support.redis_server import private_redis
from tests.support.registry import TestRegistry


@pytest.fixture(scope="session")
def redis_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
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


@pytest.fixture
def registry(redis_url: str) -> Iterator[TestRegistry]:
    registry = TestRegistry.at(redis_url)
    yield registry
    registry.redis.close()
