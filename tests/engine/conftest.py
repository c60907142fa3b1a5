"""A small checkpoint shared by the tests of the engine."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def moe_checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Qwen3-MoE checkpoint with its tokenizer."""
    return make_checkpoint(tmp_path_factory.mktemp("moe") / "tiny-moe", "qwen3_moe")
