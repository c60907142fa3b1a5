"""An engine whose weights lie wide enough apart that no choice hangs on the rounding of another batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from tests.support.engines import load_engine
from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("structured") / "tiny", "qwen3", initializer_range=0.6)


@pytest.fixture(scope="module")
def engine(model: Path) -> Iterator[Engine]:
    engine = load_engine(model)
    yield engine
    engine.close()
