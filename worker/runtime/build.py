"""Builds a worker from its settings: every part that lives as long as the worker is made and joined here."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from functools import cached_property

from celery import Celery
from prometheus_client import CollectorRegistry, ProcessCollector

from settings import Settings
from worker.app import SPARE_THREADS
from worker.broker.messages import Announcer
from worker.metrics.catalogue import TOP_TENANTS
from worker.metrics.server import MetricsServer
from worker.registry.connect import connect
from worker.registry.intake import JobIntake
from worker.registry.keys import Keys
from worker.registry.leases import Heartbeats
from worker.registry.queues import QueueFigures, ReapQueue, ShardQueue
from worker.requests.served_model import served_model_name
from worker.requests.step_engine import StepEngine, request_window
from worker.runtime.counts import CountedLeases, EngineMeter, QueueReader, UnitCounts
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits
from worker.runtime.lease_keeper import LeaseKeeper, Reaper
from worker.runtime.planner import Planner
from worker.runtime.quarantine import Quarantine
from worker.runtime.runtime import WorkerParts, WorkerRuntime, WorkerState, package_version
from worker.runtime.shard import ShardParts, ShardRunner
from worker.runtime.staged_jobs import StagedJobs
from worker.runtime.supervision import Activity, SupervisedThread, Watchdog
from worker.runtime.unit_runner import ShardSlots, UnitRunner
from worker.runtime.window import AdmissionWindow
from worker.runtime.worker_metrics import WatchedWorker, WorkerCollector, WorkerHealth
from worker.runtime.writer import ResultWriter, refused_record
from worker.schemas import WorkerInfo
from worker.tracing.spans import make_tracing
from worker.unit_closer import UnitCloser


def build_runtime(
    app: Celery, settings: Settings, load_engine: Callable[[], StepEngine], *, on_failure: Callable[[], None]
) -> WorkerRuntime:
    """A worker whose engine is still to be loaded: no thread runs yet, and nothing has connected.

    `on_failure` is called when the engine, or a thread around it, breaks: the process is to end. Raises SettingsError
    where tracing is on and its packages are not installed, or where Redis may not be used as redis.* say.
    """
    parts = _Parts(app, settings, load_engine, on_failure)
    return WorkerRuntime(
        settings,
        WorkerParts(
            worker_id=parts.worker_id,
            state=parts.state,
            client=parts.client,
            tracing=parts.tracing,
            activity=parts.activity,
            engine=parts.engine,
            held_units=parts.held_units,
            runner=parts.runner,
            planner=parts.planner,
            shards=parts.shards,
            staged_jobs=parts.staged_jobs,
            threads=parts.threads,
            watchdog=parts.watchdog_thread,
            metrics=parts.metrics,
        ),
    )


class _Parts:
    """Each part is made when another first asks for it, and once; all of them by the end of `build_runtime`."""

    def __init__(
        self, app: Celery, settings: Settings, load_engine: Callable[[], StepEngine], on_failure: Callable[[], None]
    ) -> None:
        self._settings = settings
        self._load_engine = load_engine
        self._model_name = served_model_name(settings.model)
        self._keys = Keys()
        self._announcer = Announcer(app)
        self._counts = UnitCounts()
        self._meter = EngineMeter()
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"
        self.client = connect(settings.redis)  # one pool of connections for all parts
        self.activity = Activity(settings.worker.concurrency + SPARE_THREADS)
        self.tracing = make_tracing(
            settings.tracing, service="millrace-worker", instance=self.worker_id, model_name=self._model_name
        )
        self.held_units = HeldUnits(self.tracing, on_held=self._counts.add_attempt, on_removed=self._counts.add_end)
        self.state = WorkerState(self.held_units, drain=self._drain, on_failure=on_failure)

    @cached_property
    def engine(self) -> EngineThread:
        window = AdmissionWindow(
            request_window(self._settings.engine.max_num_seqs), ageing_s=self._settings.worker.ageing_s
        )
        return EngineThread(self._load_engine, window=window, on_failure=self.state.engine_failed, meter=self._meter)

    @cached_property
    def runner(self) -> UnitRunner:
        worker = self._settings.worker
        queue = ShardQueue(self.client, self._keys, ageing_s=worker.ageing_s)
        return UnitRunner(
            self._leases,
            self._closer,
            self.held_units,
            ShardSlots(queue, self.held_units, worker.concurrency),
            Quarantine(self.held_units.send_shards_away, lambda: self.engine.num_open_requests == 0),
            is_well=self._is_well,
        )

    @cached_property
    def planner(self) -> Planner:
        return Planner(
            self._leases,
            self._announcer,
            self._closer,
            settings=self._settings.worker,
            limits=self._settings.limits,
            model_name=self._model_name,
        )

    @cached_property
    def shards(self) -> ShardRunner:
        parts = ShardParts(self._leases, self.engine, self._writer, self._closer)
        return ShardRunner(parts, limits=self._settings.limits)

    @cached_property
    def staged_jobs(self) -> StagedJobs:
        intake = JobIntake(self.client, self._keys, self._settings)
        return StagedJobs(intake, self._keys, self._announcer)

    @cached_property
    def threads(self) -> list[SupervisedThread]:
        """The threads around the engine, in the order of their start; the last of them stops first."""
        worker, failed = self._settings.worker, self.state.thread_failed
        reaper = Reaper(
            self._reap_queue,
            self._announcer,
            self._closer,
            interval_s=worker.reap_interval_s,
            is_well=self._is_well,
        )
        threads = [
            SupervisedThread("lease-keeper", self._keeper.run, on_failure=failed),
            SupervisedThread("result-writer", self._writer.run, on_failure=self.state.writer_failed),
            SupervisedThread("reaper", reaper.run, on_failure=failed),
        ]
        if self._settings.metrics.port is not None:  # else nobody could ask for what it reads
            threads.append(SupervisedThread("queue-reader", self._reader.run, on_failure=failed))
        return threads

    @cached_property
    def watchdog_thread(self) -> SupervisedThread:
        return SupervisedThread("watchdog", self._watchdog.run, on_failure=self.state.thread_failed)

    @cached_property
    def metrics(self) -> MetricsServer | None:
        """None: metrics.port is none."""
        where = self._settings.metrics
        if where.port is None:
            return None
        watched = WatchedWorker(
            settings=self._settings.worker,
            describe=self._describe,
            phase=lambda: self.state.shown_phase,
            activity=self.activity,
            engine=self.engine,
            meter=self._meter,
            held_units=self.held_units,
            keeper=self._keeper,
            counts=self._counts,
            writer=self._writer,
            watchdog=self._watchdog,
            reader=self._reader,
            threads=(*self.threads, self.watchdog_thread),
        )
        health = WorkerHealth(watched)
        registry = CollectorRegistry()  # our own: whoever imports this is not told what we measure
        registry.register(WorkerCollector(watched, health))
        ProcessCollector(registry=registry)
        return MetricsServer(where.host, where.port, registry, health.reasons)

    @cached_property
    def _leases(self) -> CountedLeases:
        worker = self._settings.worker
        return CountedLeases(self.client, self._keys, owner=self.worker_id, settings=worker, counts=self._counts)

    @cached_property
    def _closer(self) -> UnitCloser:
        return UnitCloser(self._leases, self._settings.limits)

    @cached_property
    def _reap_queue(self) -> ReapQueue:
        worker = self._settings.worker
        return ReapQueue(self.client, self._keys, grace_s=worker.reap_grace_s, ageing_s=worker.ageing_s)

    @cached_property
    def _writer(self) -> ResultWriter:
        batch_size = self._settings.worker.result_batch_size
        return ResultWriter(self._leases, batch_size=batch_size, replace_refused=refused_record)

    @cached_property
    def _keeper(self) -> LeaseKeeper:
        return LeaseKeeper(
            self._leases,
            Heartbeats(self.client, self._keys),
            self.held_units,
            self.engine,
            settings=self._settings.worker,
            describe=self._describe,
        )

    @cached_property
    def _watchdog(self) -> Watchdog:
        return Watchdog(
            self.engine,
            self.activity,
            self._reap_queue,
            hang_timeout_s=self._settings.worker.hang_timeout_s,
            on_trouble=self.state.fail,
        )

    @cached_property
    def _reader(self) -> QueueReader:
        figures = QueueFigures(self.client, self._keys, max_tenants=TOP_TENANTS)
        return QueueReader(figures, interval_s=self._settings.metrics.queue_interval_s)

    def _drain(self) -> None:
        # Not the runner's own method: the runner needs the engine, which needs the state that calls this.
        self.runner.drain()

    def _is_well(self) -> bool:
        # Half a lease: most steps take less, and whoever takes longer may hang; others look for due units meanwhile.
        return self.engine.stalled_for_s < self._settings.worker.lease_s / 2

    def _describe(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.worker_id,
            version=package_version(),
            model=self._model_name,
            steps=self.engine.num_steps,
            open_requests=self.engine.num_open_requests,
            held=len(self.held_units),
        )
