"""One run that all pages are looked at after: it takes most of the time of these tests."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.tiny_checkpoint import make_checkpoint
from tests.worker.monitor.monitored_run import MonitoredRun, monitored_run


@pytest.fixture(scope="package")
def run(tmp_path_factory: pytest.TempPathFactory) -> Iterator[MonitoredRun]:
    """Jobs that were run a moment ago."""
    model = make_checkpoint(tmp_path_factory.mktemp("model") / "tiny", "qwen3", initializer_range=0.6)
    with monitored_run(tmp_path_factory.mktemp("monitored"), model) as run:
        yield run


@pytest.fixture(scope="package")
def pictures(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where screenshots go, for people to look at."""
    return tmp_path_factory.mktemp("pictures")
