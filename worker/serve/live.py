"""What the pages show of jobs and workers, and how they stay true: server-sent events, each a part of the page anew."""

from __future__ import annotations

import asyncio
import math
import time
from collections import defaultdict
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from datetime import UTC, datetime

import redis
from starlette.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from worker.registry.exchange import perform_async
from worker.schemas import JobFilter, JobState, JobStatus, WorkerInfo
from worker.serve.context import ServeContext
from worker.serve.html import HEADERS

EVERY_S = 1.0  # a look at Redis for each tenant whose page is open, however many have it open
QUIET_S = 10.0  # after which a page is told that nothing has changed: it, and proxies, would give up
# Then the browser comes again, and with it its key: one that was revoked sees no more than this.
STREAM_S = 30.0
AGAIN_MS = 500

_UNITS = (("d", 86_400), ("h", 3_600), ("min", 60), ("s", 1))


def duration(seconds: float) -> str:
    """In the two greatest units: `2 h 5 min`."""
    left, parts = max(round(seconds), 0), list[str]()
    for unit, unit_s in _UNITS:
        if left >= unit_s or (unit == "s" and not parts):
            parts.append(f"{left // unit_s} {unit}")
            left %= unit_s
    return " ".join(parts[:2])


def moment(unix_s: float) -> str:
    """A time in words that sort; of the universal clock, as a server does not know its readers'."""
    return f"{datetime.fromtimestamp(unix_s, UTC):%Y-%m-%d %H:%M:%S} UTC"


@dataclass(frozen=True, slots=True)
class JobView:
    """A job at a time."""

    job: JobStatus
    now_s: float  # Unix time, Redis'

    @property
    def name(self) -> str:
        """What its producer calls it: the file it was dropped as, or the first of its notes."""
        return next(iter(self.job.metadata.values()), "")

    @property
    def percent(self) -> int:
        """Of its prompts; whole ones, 100 only when all have their record."""
        return int(self.job.progress * 100)

    @property
    def per_s(self) -> float:
        """Records a second since its lines were planned; 0: none yet."""
        began_s = self.job.in_progress_at
        if began_s is None:
            return 0.0
        return self.job.request_counts.finished / max((self.job.finished_at or self.now_s) - began_s, 0.001)

    @property
    def left(self) -> str:
        """How long it will take at this rate; "" where that cannot be told."""
        if self.has_ended or not self.per_s:
            return ""
        counts = self.job.request_counts
        return duration((counts.total - counts.finished) / self.per_s)

    @property
    def other_failures(self) -> int:
        """Failed prompts of no code: their records were written by workers older than the counts by code."""
        return self.job.request_counts.failed - sum(self.job.failures.values())

    @property
    def has_ended(self) -> bool:
        """Whether nothing changes any more."""
        return self.job.status.is_terminal

    @property
    def can_be_cancelled(self) -> bool:
        """Whether that would do anything."""
        return not self.job.status.is_terminal and self.job.status is not JobState.CANCELLING

    @property
    def can_be_retried(self) -> bool:
        """Whether there are lines without an answer."""
        return self.job.status.is_terminal and self.job.request_counts.failed > 0


@dataclass(frozen=True, slots=True)
class Overview:
    """A tenant's newest jobs, and the workers, which are everybody's."""

    jobs: Sequence[JobView]
    workers: Sequence[WorkerInfo]
    has_more: bool


class Views:
    """Reads lists of jobs, and the workers, at most once in EVERY_S for whatever number of pages; a job each time."""

    def __init__(self, context: ServeContext) -> None:
        self._context = context
        self._locks = defaultdict[str, asyncio.Lock](asyncio.Lock)  # no more than there are tenants with keys
        self._known: dict[str, tuple[float, Overview]] = {}  # by tenant, and when it was read
        self._workers_lock = asyncio.Lock()
        self._workers: tuple[float, Sequence[WorkerInfo]] = (-math.inf, ())  # when they were read

    async def overview(self, tenant: str, most: int) -> Overview:
        """The newest `most` jobs. Raises redis.RedisError."""
        async with self._locks[tenant]:
            now_s = time.monotonic()
            self._known = {name: known for name, known in self._known.items() if now_s < known[0] + EVERY_S}
            if tenant not in self._known:
                self._known[tenant] = (now_s, await self._read(tenant, most))
            return self._known[tenant][1]

    async def forget(self, tenant: str) -> None:
        """Read the tenant's jobs anew, as one of them is gone."""
        async with self._locks[tenant]:
            self._known.pop(tenant, None)

    async def job(self, tenant: str, job_id: str) -> JobView:
        """One of the tenant's. Raises JobNotFound, InvalidJobId, redis.RedisError."""
        return JobView(await self._context.job_of(tenant, job_id), await self._now_s())

    async def _read(self, tenant: str, most: int) -> Overview:
        jobs = await self._context.jobs.jobs(most + 1, JobFilter(tenant=tenant))
        workers, now_s = await self._read_workers(), await self._now_s()
        return Overview([JobView(job, now_s) for job in jobs[:most]], workers, len(jobs) > most)

    async def _read_workers(self) -> Sequence[WorkerInfo]:
        async with self._workers_lock:
            now_s = time.monotonic()
            if now_s >= self._workers[0] + EVERY_S:
                workers = self._context.queries.serving_workers()
                self._workers = (now_s, await perform_async(self._context.redis, workers))
            return self._workers[1]

    async def _now_s(self) -> float:
        seconds, micros = await self._context.redis.time()
        return float(seconds) + float(micros) / 1e6


class EventStream(StreamingResponse):
    """Parts of a page, each time they have changed."""

    def __init__(
        self, render: Callable[[], Awaitable[str]], stopping: asyncio.Event, place: AbstractContextManager[object]
    ) -> None:
        """`render` gives the parts; `stopping`: the server ends; `place` is given up with the stream."""
        self._place = place
        headers: Mapping[str, str] = {**HEADERS, "X-Accel-Buffering": "no"}  # nginx would wait for more
        super().__init__(_events(render, stopping), headers=headers, media_type="text/event-stream")

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send them."""
        with self._place:
            await super().__call__(scope, receive, send)


async def _events(render: Callable[[], Awaitable[str]], stopping: asyncio.Event) -> AsyncIterator[str]:
    yield f"retry: {AGAIN_MS}\n\n"
    shown, told_s = "", time.monotonic()
    ends_s = told_s + STREAM_S
    while not stopping.is_set() and time.monotonic() < ends_s:
        try:
            parts = await render()
        except (redis.RedisError, OSError):
            return  # the browser comes again, and is told why
        if parts != shown:
            shown, told_s = parts, time.monotonic()
            yield "".join(f"data: {line}\n" for line in parts.splitlines()) + "\n"
        elif time.monotonic() >= told_s + QUIET_S:
            told_s = time.monotonic()
            yield ": nothing new\n\n"
        try:
            await asyncio.wait_for(stopping.wait(), EVERY_S)
        except TimeoutError:
            continue
