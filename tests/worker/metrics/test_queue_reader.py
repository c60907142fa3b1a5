from __future__ import annotations

import pytest
import redis

from tests.support.registry import TestRegistry
from tests.support.running_thread import running_thread
from tests.support.wait_until import wait_until
from worker.registry.queues import QueueFigures, QueueReading
from worker.runtime.counts import QueueReader


class Figures(QueueFigures):
    """Those of a real queue, unless there is an error to raise."""

    def __init__(self, registry: TestRegistry) -> None:
        super().__init__(registry.redis, registry.keys, max_tenants=20)
        self.error: Exception | None = None
        self.num_reads = 0

    def read(self) -> QueueReading:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return super().read()


@pytest.fixture
def figures(registry: TestRegistry) -> Figures:
    return Figures(registry)


def test_it_reads_once_in_an_interval_whoever_asks(figures: Figures) -> None:
    reader = QueueReader(figures, interval_s=0.1)
    with running_thread(reader.run):
        wait_until(lambda: reader.latest)
        assert all(reader.latest for _ in range(1000))
        assert figures.num_reads <= 2
        wait_until(lambda: figures.num_reads >= 3)


def test_what_cannot_be_read_is_not_known(figures: Figures) -> None:
    reader = QueueReader(figures, interval_s=0.01)
    with running_thread(reader.run):
        wait_until(lambda: reader.latest)
        figures.error = redis.ConnectionError("gone")
        wait_until(lambda: reader.latest is None)
        assert not reader.has_answered
        figures.error = None
        wait_until(lambda: reader.latest)
        assert reader.has_answered


def test_a_refusal_is_an_answer(figures: Figures) -> None:
    figures.error = redis.exceptions.NoPermissionError("an ACL file of an older version")
    reader = QueueReader(figures, interval_s=0.01)
    with running_thread(reader.run):
        wait_until(lambda: figures.num_reads > 1)
    assert reader.latest is None
    assert reader.has_answered


def test_keys_that_make_no_sense_cost_the_figures_alone(figures: Figures, caplog: pytest.LogCaptureFixture) -> None:
    figures.error = ValueError("invalid literal for int()")
    reader = QueueReader(figures, interval_s=0.01)
    with running_thread(reader.run):
        wait_until(lambda: figures.num_reads > 1)
        assert reader.latest is None
        assert reader.has_answered
        figures.error = None
        wait_until(lambda: reader.latest)
    assert "the queue's figures make no sense" in caplog.text
