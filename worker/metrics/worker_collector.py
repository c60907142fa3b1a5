"""A worker's metrics, gathered when they are asked for."""

from __future__ import annotations

from collections.abc import Iterator

from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector

from worker.metrics.catalogue import METRICS
from worker.metrics.families import family
from worker.metrics.watched_worker import WatchedWorker
from worker.metrics.worker_figures import queue_figures, worker_figures
from worker.metrics.worker_health import WorkerHealth


class WorkerCollector(Collector):
    """Gathers every figure in one go. What nobody knows is left out: the engine's figures before it is loaded, the
    queue's while Redis cannot be had.
    """

    def __init__(self, worker: WatchedWorker, health: WorkerHealth) -> None:
        self._worker = worker
        self._health = health

    def describe(self) -> list[Family]:
        """Nothing: the registry asks on registration, when there is nothing to gather yet."""
        return []

    def collect(self) -> Iterator[Family]:
        """Every metric of the catalogue that is known, in its order."""
        figures = worker_figures(self._worker, self._health)
        reading = self._worker.reader.latest
        if reading is not None:
            figures |= queue_figures(reading)
        for metric in METRICS:
            if metric.name in figures:
                yield family(metric, figures[metric.name])
