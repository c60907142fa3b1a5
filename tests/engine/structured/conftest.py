"""An engine whose weights lie wide enough apart that no choice hangs on the rounding of another batch."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from engine.engine import Engine
from tests.support.engines import load_engine


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[Engine]:
    engine = load_engine(tiny_model)
    yield engine
    engine.close()
