"""A checkpoint for the command line's tests, and an environment without MILLRACE_ variables and without a .env."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import make_checkpoint


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense checkpoint whose directory is called tiny."""
    return make_checkpoint(tmp_path_factory.mktemp("cli") / "tiny", "qwen3")


@pytest.fixture(autouse=True)
def _bare_environment(bare_environment: None) -> None:
    """For every test of a command."""


@pytest.fixture
def redis_url(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> str:
    """It keeps nothing, on purpose: no command need warn of that."""
    monkeypatch.setenv("MILLRACE_REDIS__ALLOW_UNSAFE", "true")
    return redis_url
