"""What a worker tells those who run it."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, ProcessCollector

from settings import MetricsSettings
from worker.metrics.metrics_server import MetricsServer
from worker.metrics.watched_worker import WatchedWorker
from worker.metrics.worker_collector import WorkerCollector
from worker.metrics.worker_health import WorkerHealth


class WorkerMetrics:
    """/metrics and /healthz of one worker, where metrics.port says so: nowhere without one."""

    def __init__(self, settings: MetricsSettings, worker: WatchedWorker) -> None:
        self._settings = settings
        self._worker = worker
        self._server: MetricsServer | None = None

    def serve(self) -> None:
        """Begin to answer. Raises SettingsError if the port cannot be had."""
        if self._settings.port is None:
            return
        health = WorkerHealth(self._worker)
        registry = CollectorRegistry()  # our own: whoever imports this is not told what we measure
        registry.register(WorkerCollector(self._worker, health))
        ProcessCollector(registry=registry)
        self._server = MetricsServer(self._settings.host, self._settings.port, registry, health.reasons)

    def close(self) -> None:
        """Answer no more."""
        if self._server is not None:
            self._server.close()
