"""A small checkpoint for the tests of the engine, and an engine whose tokens do not depend on rounding."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.engines import OpenEngine, load_engine
from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint with its tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("moe") / "tiny-moe", "qwen3_moe")


@pytest.fixture(scope="module")
def engine(tiny_model: Path) -> Iterator[OpenEngine]:
    engine = load_engine(tiny_model)
    yield engine
    engine.close()
