"""Hides the `.env` and the MILLRACE_ variables of this machine from the tests of the settings."""

from __future__ import annotations

import os
from pathlib import Path

import pytest


@pytest.fixture(autouse=True)
def _bare_surroundings(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in list(os.environ):
        if name.upper().startswith("MILLRACE_"):
            monkeypatch.delenv(name)
