"""Threads follow the cores this process may use and the container's quota."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from engine.loading.derived_settings import usable_cores


@pytest.mark.parametrize(("text", "cores"), [("50000 100000", 1), ("100000 100000", 1), ("max 100000", None)])
def test_a_quota_bounds_the_threads(tmp_path: Path, text: str, cores: int | None) -> None:
    (tmp_path / "cpu.max").write_text(text + "\n")
    assert usable_cores(tmp_path / "cpu.max") == (cores or len(os.sched_getaffinity(0)))


def test_without_a_container_every_allowed_core_counts(tmp_path: Path) -> None:
    assert usable_cores(tmp_path / "cpu.max") == len(os.sched_getaffinity(0))
