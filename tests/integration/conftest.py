"""A checkpoint and a Redis for whole runs."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.free_port import free_port
from tests.support.redis_server import private_redis
from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights wide enough apart that no choice of a token hangs on rounding: two runs must agree to the byte."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3", initializer_range=0.6)


@pytest.fixture
def redis_url(tmp_path: Path) -> Iterator[str]:
    """A Redis of the test's own."""
    with private_redis(tmp_path, port=free_port()) as url:
        yield url
