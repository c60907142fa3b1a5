"""A checkpoint for a real worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Weights wide enough apart that no choice of a token hangs on rounding: two runs must agree to the byte."""
    return make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3", initializer_range=0.6)
