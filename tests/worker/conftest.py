"""The registry's classes over the tests' Redis, a client and real workers."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.registry import TestRegistry
from tests.support.worker_processes import WorkerProcesses, worker_processes
from worker.client import BatchClient


@pytest.fixture
def registry(redis_url: str) -> Iterator[TestRegistry]:
    registry = TestRegistry.at(redis_url)
    yield registry
    registry.redis.close()


@pytest.fixture
def client(redis_url: str) -> Iterator[BatchClient]:
    with BatchClient(redis_url) as client:
        yield client


@pytest.fixture
def workers(redis_url: str, tmp_path: Path) -> Iterator[WorkerProcesses]:
    with worker_processes(redis_url, tmp_path) as workers:
        yield workers
