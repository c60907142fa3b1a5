"""Starts and stops what a worker process has beside Celery, and answers the tasks; see build.py for its parts."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata

import redis

from settings import Settings
from worker.broker.messages import MessageEnd
from worker.metrics.server import MetricsServer
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import StopReason
from worker.requests.served_model import ServedModel, served_model_name
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits
from worker.runtime.planner import Planner
from worker.runtime.shard import ShardRunner
from worker.runtime.staged_jobs import StagedJobs
from worker.runtime.supervision import Activity, SupervisedThread
from worker.runtime.unit_runner import UnitRunner
from worker.runtime.worker_metrics import Phase
from worker.tracing.spans import Tracing

RELEASE_TIMEOUT_S = 5.0  # for units to be given back once they were told to stop
THREAD_TIMEOUT_S = 5.0  # for each thread to end

logger = logging.getLogger(__name__)


class WorkerState:
    """How far this worker has come, and what is done when the engine or a thread around it breaks."""

    def __init__(self, held_units: HeldUnits, *, drain: Callable[[], None], on_failure: Callable[[], None]) -> None:
        self.phase: Phase = "starting"
        self._held_units = held_units
        self._drain = drain  # claims no more units
        self._on_failure = on_failure  # has this process end
        self.has_failed = False  # the engine, or a thread around it, broke

    @property
    def shown_phase(self) -> Phase:
        """The phase, or `failed` since something broke, while the worker stops too."""
        return "failed" if self.has_failed else self.phase

    def engine_failed(self, _error: BaseException) -> None:
        """The engine broke."""
        self.fail(StopReason.ENGINE_FAILED)

    def writer_failed(self, _error: BaseException) -> None:
        """The result writer broke, perhaps over a record of ours: as with the engine, that counts as an attempt.

        Otherwise the units would come round for ever.
        """
        self.fail(StopReason.ENGINE_FAILED)

    def thread_failed(self, _error: BaseException) -> None:
        """Another thread broke. That has nothing to do with the held units: it costs them no attempt."""
        self.fail(StopReason.RELEASED)

    def fail(self, reason: StopReason) -> None:
        """Give the held units to other workers and have this process end; called on the thread that broke."""
        self.has_failed = True
        self._drain()
        self._held_units.stop_all(reason)
        self._on_failure()


@dataclass(frozen=True, slots=True)
class WorkerParts:
    """What a worker starts, stops and asks."""

    worker_id: str  # unique to this process
    state: WorkerState
    client: redis.Redis
    tracing: Tracing
    activity: Activity
    engine: EngineThread
    held_units: HeldUnits
    runner: UnitRunner
    planner: Planner
    shards: ShardRunner
    staged_jobs: StagedJobs
    threads: Sequence[SupervisedThread]  # around the engine, in the order of their start; the last one stops first
    watchdog: SupervisedThread
    metrics: MetricsServer | None  # None: nobody could ask


class WorkerRuntime:
    """The engine's thread, the threads around it, and what the tasks call. One to a process."""

    def __init__(self, settings: Settings, parts: WorkerParts) -> None:
        self._settings = settings
        self._parts = parts

    @property
    def worker_id(self) -> str:
        """Host, process and six random digits: the owner of this worker's leases."""
        return self._parts.worker_id

    @property
    def drain_timeout_s(self) -> float:
        """How long running prompts may still finish on stop."""
        return self._settings.worker.drain_timeout_s

    @property
    def has_failed(self) -> bool:
        """Whether the engine, or a thread around it, broke."""
        return self._parts.state.has_failed

    def load(self) -> None:
        """Check that Redis answers and metrics.port is free, then load the engine, which may take minutes.

        Raises redis.RedisError, SettingsError, EngineError.
        """
        parts, model = self._parts, self._settings.model
        parts.client.ping()
        if parts.metrics is not None:
            parts.metrics.start()
        logger.info("loading the model", extra={"model": served_model_name(model)})
        parts.shards.serve(ServedModel(parts.engine.start(), model))

    def start(self) -> None:
        """Start the threads around the engine."""
        for thread in (*self._parts.threads, self._parts.watchdog):
            thread.start()
        self._parts.state.phase = "up"
        model, concurrency = served_model_name(self._settings.model), self._settings.worker.concurrency
        fields = {"model": model, "version": package_version(), "concurrency": concurrency}
        logger.info("worker %s is up", self.worker_id, extra=fields)

    def tick(self, num_answers: object) -> None:
        """Note that Celery's event loop turns; see Activity.tick."""
        self._parts.activity.tick(num_answers)

    def submit(self, job_id: str, num_lines: int, options: Mapping[str, object]) -> MessageEnd:
        """Accept, or remember as refused, a job that a plain Celery producer staged."""
        with self._parts.activity.task():
            return self._parts.staged_jobs.submit(job_id, num_lines, options)

    def plan(self, message_id: str, job_id: str) -> MessageEnd:
        """Plan a job."""
        with self._parts.activity.task():
            return self._parts.runner.run(UnitRef.plan(job_id), message_id, self._parts.planner.plan)

    def run_shard(self, message_id: str, job_id: str, number: int) -> MessageEnd:
        """Run a shard."""
        with self._parts.activity.task():
            return self._parts.runner.run(UnitRef.shard(job_id, number), message_id, self._parts.shards.run)

    def interrupt(self, message_id: str) -> None:
        """Give back, at once, the unit that a message brought."""
        self._parts.held_units.stop_message(message_id, StopReason.RELEASED)

    def stop(self, drain_timeout_s: float) -> None:
        """Claim no more, wait for what runs, give back what is left after `drain_timeout_s`, stop every thread.

        Waits at most that long and 37 s, even if the engine and Redis hang. A second call does nothing.
        """
        parts = self._parts
        if parts.state.phase != "up":
            return
        parts.state.phase = "draining"
        logger.info("worker %s stops", self.worker_id, extra={"units": len(parts.held_units)})
        # From here on Celery's event loop stands still while this thread waits.
        parts.watchdog.stop(THREAD_TIMEOUT_S)
        parts.runner.drain()
        if not parts.held_units.wait_empty(drain_timeout_s):
            parts.held_units.stop_all(StopReason.RELEASED)
            if not parts.held_units.wait_empty(RELEASE_TIMEOUT_S):
                logger.warning("%d units could not be given back: their leases run out", len(parts.held_units))
        for thread in reversed(parts.threads):
            thread.stop(THREAD_TIMEOUT_S)
        if not parts.engine.stop(THREAD_TIMEOUT_S):
            logger.warning("the engine hangs in a step and is left behind")
        parts.tracing.close()
        if parts.metrics is not None:
            parts.metrics.close()
        parts.client.close()


def package_version() -> str:
    """The installed version; `source` where it runs from a source tree that is not installed."""
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:
        return "source"
