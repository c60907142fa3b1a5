"""Fixtures of the worker's tests: the registry over the tests' Redis, a client, real workers, one monitored run.

All tests that look at pages share the monitored run, which takes most of their time.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.monitoring import MonitoredRun, monitored_run
from tests.support.registry import TestRegistry
from tests.support.tiny_checkpoint import make_checkpoint
from tests.support.workers import WorkerProcesses, worker_processes
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


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredRun]:
    """A monitored run whose jobs have just ended."""
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3", initializer_range=0.6)
    with monitored_run(tmp_path_factory.mktemp("monitored"), model) as run:
        yield run


@pytest.fixture(scope="package")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go, for people to look at."""
    return tmp_path_factory.mktemp("pictures")
