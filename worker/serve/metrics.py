"""Answers `/metrics`: the queue's figures, also while no worker is up, and what this server has done."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import Iterator, Mapping

import redis
from prometheus_client import PROCESS_COLLECTOR, CollectorRegistry, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4
from prometheus_client.metrics_core import Metric as Family
from prometheus_client.registry import Collector
from redis.asyncio import Redis as AsyncRedis
from starlette.requests import Request
from starlette.responses import Response

from settings import RedisSettings
from worker.metrics.catalogue import QUEUE_METRICS, SERVER_METRICS, TOP_TENANTS
from worker.metrics.figures import Figure, plain_family, queue_figures
from worker.registry.backlog import Backlog, backlog
from worker.registry.connect import connect
from worker.registry.exchange import perform_async
from worker.registry.keys import Keys
from worker.registry.models import ModelDirectory
from worker.registry.queues import QueueFigures, QueueReading


class RequestCounts:
    """What this server has answered since it started."""

    def __init__(self) -> None:
        self.requests: Counter[tuple[str, str, str]] = Counter()  # by method, route and status
        self.uploaded_bytes = 0
        self.open_uploads = 0

    def figures(self) -> dict[str, Figure]:
        """Its metrics."""
        requests: Mapping[tuple[str, ...], float] = dict(self.requests.items())
        return {
            "millrace_http_requests_total": requests,
            "millrace_http_uploaded_bytes_total": self.uploaded_bytes,
            "millrace_http_open_uploads": self.open_uploads,
        }


class ServerMetrics:
    """Reads the queue at most once in `interval_s`, however many ask."""

    def __init__(self, client: AsyncRedis, settings: RedisSettings, counts: RequestCounts, interval_s: float) -> None:
        self._client = client
        self._settings = settings
        self._counts = counts
        self._interval_s = interval_s
        self._lock = asyncio.Lock()
        self._read_at_s = float("-inf")
        self._figures: Mapping[str, Figure] = {}

    async def response(self, _request: Request) -> Response:
        """All figures. Raises redis.RedisError when Redis cannot be had, as they would be of another time."""
        async with self._lock:
            if time.monotonic() >= self._read_at_s + self._interval_s:
                found = await perform_async(self._client, backlog(Keys()))
                reading = await asyncio.to_thread(_read_queue, self._settings)
                self._figures = {**queue_figures(reading), **backlog_figures(found)}
                self._read_at_s = time.monotonic()
        registry = CollectorRegistry()
        registry.register(PROCESS_COLLECTOR)
        registry.register(_Snapshot({**self._figures, **self._counts.figures()}))
        return Response(generate_latest(registry), media_type=CONTENT_TYPE_PLAIN_0_0_4)


class _Snapshot(Collector):
    """Figures of one moment."""

    def __init__(self, figures: Mapping[str, Figure]) -> None:
        self._figures = figures

    def describe(self) -> list[Family]:
        """Nothing: the registry would gather the figures for it."""
        return []

    def collect(self) -> Iterator[Family]:
        """Each in the order of the catalogue."""
        for metric in (*QUEUE_METRICS, *SERVER_METRICS):
            yield plain_family(metric, self._figures[metric.name])


def backlog_figures(found: Backlog) -> dict[str, Figure]:
    """Figures by model."""
    return {
        "millrace_queue_model_open_prompts": {model.model: model.open_prompts for model in found.models},
        "millrace_queue_model_waiting_prompts": {model.model: model.waiting_prompts for model in found.models},
        "millrace_queue_model_open_tokens": {model.model: model.open_tokens for model in found.models},
        "millrace_queue_model_waiting_tokens": {model.model: model.waiting_tokens for model in found.models},
        "millrace_queue_model_oldest_wait_seconds": {model.model: model.oldest_wait_s for model in found.models},
        "millrace_queue_unread_units": found.num_unread_units,
    }


def _read_queue(settings: RedisSettings) -> QueueReading:
    keys = Keys()
    client: redis.Redis
    with connect(settings) as client:
        directory = ModelDirectory(client, keys, worker_id="")  # which announces nothing
        return QueueFigures(directory, keys, max_tenants=TOP_TENANTS).read()
