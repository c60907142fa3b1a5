"""Fixtures of the fault injection: an emptied Redis, an impatient client, workers with the fake engine."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import redis

from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.jobs import impatient_client
from tests.support.redis_servers import RestartableRedis, restartable_redis
from worker.client import BatchClient


@pytest.fixture
def bare(redis_url: str) -> Iterator[redis.Redis]:
    with redis.Redis.from_url(redis_url) as bare:
        yield bare


@pytest.fixture
def client(redis_url: str) -> Iterator[BatchClient]:
    with impatient_client(redis_url) as client:
        yield client


@pytest.fixture
def fleet(redis_url: str, tmp_path: Path) -> Iterator[Fleet]:
    with running_fleet(redis_url, tmp_path) as fleet:
        yield fleet


@pytest.fixture
def durable_redis(tmp_path: Path) -> Iterator[RestartableRedis]:
    """A Redis that keeps its data over a restart, in an append-only file."""
    with restartable_redis(tmp_path, is_durable=True) as server:
        yield server


@pytest.fixture
def forgetful_redis(tmp_path: Path) -> Iterator[RestartableRedis]:
    """A Redis that forgets everything in a restart."""
    with restartable_redis(tmp_path, is_durable=False) as server:
        yield server
