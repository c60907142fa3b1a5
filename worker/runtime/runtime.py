"""Builds everything a worker process has beside Celery, starts and stops it, and answers the tasks."""

from __future__ import annotations

import logging
import os
import socket
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from importlib import metadata
from typing import Self

import redis
from celery import Celery

from settings import Settings
from worker.app import SPARE_THREADS
from worker.broker.messages import Announcer, MessageEnd
from worker.metrics.catalogue import TOP_TENANTS
from worker.registry.connect import connect
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import Heartbeats, UnitLeases
from worker.registry.lifecycle import StopReason
from worker.registry.queues import QueueFigures, ReapQueue, ShardQueue
from worker.requests.served_model import ServedModel, served_model_name
from worker.requests.step_engine import StepEngine, request_window
from worker.runtime.counts import CountedLeases, EngineMeter, QueueReader, UnitCounts
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnit, HeldUnits
from worker.runtime.lease_keeper import LeaseKeeper, Reaper
from worker.runtime.planner import Planner
from worker.runtime.shard import ShardPrompts, ShardRun
from worker.runtime.staged_jobs import StagedJobs
from worker.runtime.supervision import Activity, SupervisedThread, Watchdog
from worker.runtime.unit_runner import EngineState, ShardSlots, UnitRunner
from worker.runtime.window import AdmissionWindow
from worker.runtime.worker_metrics import Phase, WatchedWorker, WorkerMetrics
from worker.runtime.writer import ResultWriter, refused_record
from worker.schemas import WorkerInfo
from worker.tracing.spans import make_tracing
from worker.unit_closer import UnitCloser

RELEASE_TIMEOUT_S = 5.0  # for units to be given back once they were told to stop
THREAD_TIMEOUT_S = 5.0  # for each thread to end

logger = logging.getLogger(__name__)


class WorkerRuntime:
    """The engine's thread, the threads around it, and what the tasks call. One to a process."""

    def __init__(
        self,
        app: Celery,
        settings: Settings,
        load_engine: Callable[[], StepEngine],
        *,
        on_failure: Callable[[], None],
    ) -> None:
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self._settings = settings
        self._model_name = served_model_name(settings.model)
        self._on_failure = on_failure  # the engine, or a thread around it, broke: this process is to end
        self._has_failed = False
        self._phase: Phase = "starting"
        self._served: ServedModel | None = None  # None: not loaded yet
        self._activity = Activity(settings.worker.concurrency + SPARE_THREADS)
        self._counts, self._meter = UnitCounts(), EngineMeter()
        self._tracing = make_tracing(
            settings.tracing, service="millrace-worker", instance=self.worker_id, model_name=self._model_name
        )
        self._held_units = HeldUnits(self._tracing, on_held=self._counts.add_attempt, on_removed=self._counts.add_end)
        self._registry = registry = RegistryParts.connect(settings, self.worker_id, self._counts)
        worker, leases, announcer = settings.worker, registry.leases, Announcer(app)
        window = AdmissionWindow(request_window(settings.engine.max_num_seqs), ageing_s=worker.ageing_s)
        self._engine = EngineThread(load_engine, window=window, on_failure=self._engine_failed, meter=self._meter)
        self._closer = closer = UnitCloser(leases, settings.limits)
        self._runner = self._make_runner()
        self._planner = Planner(
            leases, announcer, closer, settings=worker, limits=settings.limits, model_name=self._model_name
        )
        self._staged_jobs = StagedJobs(registry.client, registry.keys, announcer, settings=settings)
        self._writer = ResultWriter(leases, batch_size=worker.result_batch_size, replace_refused=refused_record)
        self._threads = self._make_threads(announcer)
        watchdog = self._make_watchdog()
        self._watchdog = SupervisedThread("watchdog", watchdog.run, on_failure=self._thread_failed)
        self._metrics = self._make_metrics(watchdog)

    @property
    def drain_timeout_s(self) -> float:
        """How long running prompts may still finish on stop."""
        return self._settings.worker.drain_timeout_s

    @property
    def has_failed(self) -> bool:
        """Whether the engine, or a thread around it, broke."""
        return self._has_failed

    def load(self) -> None:
        """Check that Redis answers and metrics.port is free, then load the engine, which may take minutes.

        Raises redis.RedisError, SettingsError, EngineError.
        """
        self._registry.client.ping()
        self._metrics.serve()
        logger.info("loading the model", extra={"model": self._model_name})
        self._served = ServedModel(self._engine.start(), self._settings.model)

    def start(self) -> None:
        """Start the threads around the engine."""
        for thread in (*self._threads, self._watchdog):
            thread.start()
        self._phase = "up"
        worker = self._settings.worker
        fields = {"model": self._model_name, "version": package_version(), "concurrency": worker.concurrency}
        logger.info("worker %s is up", self.worker_id, extra=fields)

    def tick(self, num_answers: object) -> None:
        """Celery's event loop turns; see Activity.tick."""
        self._activity.tick(num_answers)

    def submit(self, job_id: str, num_lines: int, options: Mapping[str, object]) -> MessageEnd:
        """Accept, or remember as refused, a job that a plain Celery producer staged."""
        with self._activity.task():
            return self._staged_jobs.submit(job_id, num_lines, options)

    def plan(self, message_id: str, job_id: str) -> MessageEnd:
        """Plan a job."""
        with self._activity.task():
            return self._runner.run(UnitRef.plan(job_id), message_id, self._planner.plan)

    def run_shard(self, message_id: str, job_id: str, number: int) -> MessageEnd:
        """Run a shard."""
        with self._activity.task():
            return self._runner.run(UnitRef.shard(job_id, number), message_id, self._run_claimed_shard)

    def interrupt(self, message_id: str) -> None:
        """Give back, at once, the unit that a message brought."""
        self._held_units.stop_message(message_id, StopReason.RELEASED)

    def stop(self, drain_timeout_s: float) -> None:
        """Claim no more, wait for what runs, give back what is left after `drain_timeout_s`, stop every thread.

        Waits at most that long and 37 s, even if the engine and Redis hang. Once more does nothing.
        """
        if self._phase != "up":
            return
        self._phase = "draining"
        logger.info("worker %s stops", self.worker_id, extra={"units": len(self._held_units)})
        # From here on Celery's event loop stands still while this thread waits.
        self._watchdog.stop(THREAD_TIMEOUT_S)
        self._runner.drain()
        if not self._held_units.wait_empty(drain_timeout_s):
            self._held_units.stop_all(StopReason.RELEASED)
            if not self._held_units.wait_empty(RELEASE_TIMEOUT_S):
                logger.warning("%d units could not be given back: their leases run out", len(self._held_units))
        for thread in reversed(self._threads):
            thread.stop(THREAD_TIMEOUT_S)
        if not self._engine.stop(THREAD_TIMEOUT_S):
            logger.warning("the engine hangs in a step and is left behind")
        self._tracing.close()
        self._metrics.close()
        self._registry.client.close()

    def _run_claimed_shard(self, held: HeldUnit) -> None:
        if self._served is None:
            raise RuntimeError("a shard was taken before the engine was loaded")
        prompts = ShardPrompts(held.claim, self._served, limits=self._settings.limits)
        ShardRun(
            held,
            prompts,
            leases=self._registry.leases,
            engine=self._engine,
            writer=self._writer,
            closer=self._closer,
        ).run()

    def _make_runner(self) -> UnitRunner:
        registry, worker = self._registry, self._settings.worker
        return UnitRunner(
            registry.leases,
            self._closer,
            self._held_units,
            give_back_for_s=worker.lease_s,
            slots=ShardSlots(registry.shard_queue, self._held_units, worker.concurrency),
            engine=EngineState(self._is_well, lambda: self._engine.num_open_requests == 0),
        )

    def _make_threads(self, announcer: Announcer) -> list[SupervisedThread]:
        """The threads around the engine, in the order of their start; the last of them stops first."""
        registry, worker = self._registry, self._settings.worker
        self._keeper = LeaseKeeper(
            registry.leases,
            registry.heartbeats,
            self._held_units,
            self._engine,
            settings=worker,
            describe=self._describe,
        )
        reaper = Reaper(
            registry.reap_queue, announcer, self._closer, interval_s=worker.reap_interval_s, is_well=self._is_well
        )
        return [
            SupervisedThread("lease-keeper", self._keeper.run, on_failure=self._thread_failed),
            SupervisedThread("result-writer", self._writer.run, on_failure=self._writer_failed),
            SupervisedThread("reaper", reaper.run, on_failure=self._thread_failed),
        ]

    def _make_watchdog(self) -> Watchdog:
        return Watchdog(
            self._engine,
            self._activity,
            self._registry.reap_queue,
            hang_timeout_s=self._settings.worker.hang_timeout_s,
            on_trouble=self._fail,
        )

    def _make_metrics(self, watchdog: Watchdog) -> WorkerMetrics:
        settings, registry = self._settings.metrics, self._registry
        figures = QueueFigures(registry.client, registry.keys, max_tenants=TOP_TENANTS)
        reader = QueueReader(figures, interval_s=settings.queue_interval_s)
        if settings.port is not None:  # else nobody could ask for what it reads
            self._threads.append(SupervisedThread("queue-reader", reader.run, on_failure=self._thread_failed))
        return WorkerMetrics(
            settings,
            WatchedWorker(
                settings=self._settings.worker,
                describe=self._describe,
                phase=lambda: "failed" if self._has_failed else self._phase,
                activity=self._activity,
                engine=self._engine,
                meter=self._meter,
                held_units=self._held_units,
                keeper=self._keeper,
                counts=self._counts,
                writer=self._writer,
                watchdog=watchdog,
                reader=reader,
                threads=(*self._threads, self._watchdog),
            ),
        )

    def _engine_failed(self, _error: BaseException) -> None:
        self._fail(StopReason.ENGINE_FAILED)

    def _writer_failed(self, _error: BaseException) -> None:
        # Perhaps over a record of ours: as with the engine, the units must not come round for ever.
        self._fail(StopReason.ENGINE_FAILED)

    def _thread_failed(self, _error: BaseException) -> None:
        # Nothing to do with the units held here: an attempt of theirs must not be lost over it.
        self._fail(StopReason.RELEASED)

    def _fail(self, reason: StopReason) -> None:
        """On the thread that broke: the held units go to other workers, and this process ends."""
        self._has_failed = True
        self._runner.drain()
        self._held_units.stop_all(reason)
        self._on_failure()

    def _is_well(self) -> bool:
        # Half a lease: most steps take less, and whoever takes longer may hang; others look for due units meanwhile.
        return self._engine.stalled_for_s < self._settings.worker.lease_s / 2

    def _describe(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.worker_id,
            version=package_version(),
            model=self._model_name,
            steps=self._engine.num_steps,
            open_requests=self._engine.num_open_requests,
            held=len(self._held_units),
        )


@dataclass(frozen=True, slots=True)
class RegistryParts:
    """The registry's classes that a worker needs, over one connection pool."""

    client: redis.Redis
    keys: Keys
    leases: UnitLeases
    reap_queue: ReapQueue
    shard_queue: ShardQueue
    heartbeats: Heartbeats

    @classmethod
    def connect(cls, settings: Settings, owner: str, counts: UnitCounts) -> Self:
        """For a worker called `owner`. Nothing connects before it is used."""
        client, keys, worker = connect(settings.redis), Keys(), settings.worker
        leases = CountedLeases(client, keys, owner=owner, settings=worker, counts=counts)
        reap_queue = ReapQueue(client, keys, grace_s=worker.reap_grace_s, ageing_s=worker.ageing_s)
        shard_queue = ShardQueue(client, keys, ageing_s=worker.ageing_s)
        return cls(client, keys, leases, reap_queue, shard_queue, Heartbeats(client, keys))


def package_version() -> str:
    """The installed version; `source` where it runs from a source tree that is not installed."""
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:
        return "source"
