"""Makes every part of a worker that lives as long as the worker, from its settings, and joins them."""

from __future__ import annotations

import os
import socket
import uuid
from collections.abc import Callable
from importlib import metadata

from celery import Celery
from prometheus_client import CollectorRegistry, ProcessCollector

from settings import Settings
from worker.app import SPARE_THREADS
from worker.broker.messages import Announcer
from worker.callbacks.sender import CallbackSender
from worker.lines.request_line import names_model
from worker.metrics.catalogue import TOP_TENANTS
from worker.metrics.server import MetricsServer
from worker.registry.callbacks import CallbackOutbox
from worker.registry.connect import connect
from worker.registry.intake import JobIntake
from worker.registry.keys import Keys
from worker.registry.models import Announcement, Heartbeats, ModelDirectory
from worker.registry.queues import QueueFigures, ReapQueue, ShardQueue
from worker.registry.trust import Trust
from worker.requests.served_model import served_names
from worker.requests.step_engine import StepEngine, request_window
from worker.runtime.counts import CountedLeases, EngineMeter, QueueReader, UnitCounts
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits
from worker.runtime.lease_keeper import MISSED_BEATS, LeaseKeeper, Reaper, beat_interval_s
from worker.runtime.planner import Planner
from worker.runtime.quarantine import Quarantine
from worker.runtime.shard import ShardParts, ShardRunner
from worker.runtime.staged_jobs import StagedJobs
from worker.runtime.supervision import Activity, SupervisedThread, Watchdog, WorkerState
from worker.runtime.unit_runner import ShardSlots, UnitRunner
from worker.runtime.window import AdmissionWindow
from worker.runtime.worker_metrics import WatchedWorker, WorkerCollector, WorkerHealth
from worker.runtime.writer import ResultWriter, refused_record
from worker.schemas import EngineLoad, WorkerInfo
from worker.tracing.spans import make_tracing
from worker.unit_closer import UnitCloser


class WorkerParts:
    """The parts of a worker whose engine is still to be loaded: no thread runs yet, and nothing has connected.

    `on_failure` is called when the engine, or a thread around it, breaks: the process is to end. Raises SettingsError
    where tracing is on and its packages are not installed, or where Redis may not be used as redis.* say.
    """

    def __init__(
        self, app: Celery, settings: Settings, load_engine: Callable[[], StepEngine], *, on_failure: Callable[[], None]
    ) -> None:
        worker, limits = settings.worker, settings.limits
        self.settings = settings
        self.announcement = announced_names(settings)
        self.model_name = self.announcement.name
        self.worker_id = f"{socket.gethostname()}-{os.getpid()}-{uuid.uuid4().hex[:6]}"  # owns its leases
        self.client = connect(settings.redis)  # one pool of connections for all parts
        self.activity = Activity(worker.concurrency + SPARE_THREADS)
        self.tracing = make_tracing(
            settings.tracing, service="millrace-worker", instance=self.worker_id, model_name=self.model_name
        )
        self._keys, self._announcer = Keys(), Announcer(app)
        self._callbacks = CallbackSender(CallbackOutbox(self.client, self._keys), app, settings)
        # Without redis.ack, which is a client's: a job that a worker accepts is in Redis's file behind its message.
        not_waiting = settings.redis.model_copy(update={"ack": "memory"})
        self.trust = Trust(self.client, self._keys, not_waiting)
        self.directory = ModelDirectory(self.client, self._keys, worker_id=self.worker_id, known=limits.model_names)
        self._counts, self._meter = UnitCounts(), EngineMeter()
        self.held_units = HeldUnits(self.tracing, on_held=self._counts.add_attempt, on_removed=self._counts.add_end)
        self.state = WorkerState(self.held_units, drain=self._drain, on_failure=on_failure)
        window = AdmissionWindow(request_window(settings.engine.max_num_seqs), ageing_s=worker.ageing_s)
        self.engine = EngineThread(load_engine, window=window, on_failure=self.state.engine_failed, meter=self._meter)
        names = self.announcement.names
        self._leases = CountedLeases(
            self.client, self._keys, owner=self.worker_id, settings=worker, models=names, counts=self._counts
        )
        self._closer = UnitCloser(self._leases, limits)
        self._writer = ResultWriter(self._leases, batch_size=worker.result_batch_size, replace_refused=refused_record)
        self._shard_parts = ShardParts(self._leases, self.engine, self._writer, self._closer)
        self.runner = self._make_runner()
        self.planner = Planner(
            self._leases, self._announcer, self._closer, self.directory, settings=worker, limits=limits
        )
        self.shards = ShardRunner(self._shard_parts, limits=limits)
        self.staged_jobs = StagedJobs(JobIntake(self.client, self._keys, settings), self._keys, self._announcer)
        self._make_threads()

    def _make_runner(self) -> UnitRunner:
        worker = self.settings.worker
        queue = ShardQueue(self.client, self._keys, ageing_s=worker.ageing_s, models=self.announcement.names)
        slots = ShardSlots(queue, self.held_units, self._announcer, worker.concurrency, turn=self._shard_parts.turn)
        return UnitRunner(
            self._leases,
            self._closer,
            self.held_units,
            slots,
            Quarantine(self.held_units.send_shards_away, lambda: self.engine.num_open_requests == 0),
            is_well=self._is_well,
        )

    def _make_threads(self) -> None:
        worker, failed = self.settings.worker, self.state.thread_failed
        heartbeats = Heartbeats(self.directory, self._keys)
        keeper = LeaseKeeper(
            self._leases, heartbeats, self.held_units, self.engine, settings=worker, describe=self._describe
        )
        due = ReapQueue(
            self.directory,
            self._keys,
            grace_s=worker.reap_grace_s,
            ageing_s=worker.ageing_s,
            patience_s=MISSED_BEATS * beat_interval_s(worker),
        )
        reaper = Reaper(
            due,
            self._announcer,
            self._closer,
            interval_s=worker.reap_interval_s,
            is_well=self._is_well,
            offer=self.runner.offer,
        )
        watchdog = Watchdog(
            self.engine, self.activity, due, hang_timeout_s=worker.hang_timeout_s, on_trouble=self.state.fail
        )
        figures = QueueFigures(self.directory, self._keys, max_tenants=TOP_TENANTS)
        reader = QueueReader(figures, interval_s=self.settings.metrics.queue_interval_s)
        self.watchdog = SupervisedThread("watchdog", watchdog.run, on_failure=failed)
        self.threads = [  # around the engine, in the order of their start; the last stops first
            SupervisedThread("lease-keeper", keeper.run, on_failure=failed),
            SupervisedThread("result-writer", self._writer.run, on_failure=self.state.writer_failed),
            SupervisedThread("reaper", reaper.run, on_failure=failed),
        ]
        if self._callbacks.has_work:
            self.threads.append(SupervisedThread("callbacks", self._callbacks.run, on_failure=failed))
        self.metrics: MetricsServer | None = None
        if self.settings.metrics.port is not None:  # else nobody could ask for what the reader reads
            self.threads.append(SupervisedThread("queue-reader", reader.run, on_failure=failed))
            self.metrics = self._make_metrics(self.settings.metrics.port, keeper, watchdog, reader)

    def _make_metrics(self, port: int, keeper: LeaseKeeper, watchdog: Watchdog, reader: QueueReader) -> MetricsServer:
        watched = WatchedWorker(
            settings=self.settings.worker,
            describe=self._describe,
            phase=lambda: self.state.shown_phase,
            activity=self.activity,
            engine=self.engine,
            meter=self._meter,
            held_units=self.held_units,
            keeper=keeper,
            counts=self._counts,
            writer=self._writer,
            watchdog=watchdog,
            reader=reader,
            threads=(*self.threads, self.watchdog),
        )
        health = WorkerHealth(watched)
        registry = CollectorRegistry()  # not the global one, which other code in this process may also serve
        registry.register(WorkerCollector(watched, health))
        ProcessCollector(registry=registry)
        return MetricsServer(self.settings.metrics.host, port, registry, health.reasons)

    def _drain(self) -> None:
        # The state needs this before there is a runner, which needs the engine, which needs the state.
        self.runner.drain()

    def _is_well(self) -> bool:
        # Most steps take less than half a lease. A longer one may hang; other workers look for due units meanwhile.
        return self.engine.stalled_for_s < self.settings.worker.lease_s / 2

    def _describe(self) -> WorkerInfo:
        return WorkerInfo(
            id=self.worker_id,
            version=package_version(),
            model=self.model_name,
            steps=self.engine.num_steps,
            open_requests=self.engine.num_open_requests,
            held=len(self.held_units),
            engine=self._engine_load(),
        )

    def _engine_load(self) -> EngineLoad | None:
        stats = self._meter.stats
        if stats is None:  # it is not loaded yet
            return None
        return EngineLoad(
            kv_blocks=max(stats.num_blocks - 1, 0),  # less the null block
            used_kv_blocks=max(stats.num_blocks - 1 - stats.num_free_blocks, 0),
            prompt_tokens=stats.prompt_tokens,
            cached_tokens=stats.cached_tokens,
        )


def announced_names(settings: Settings) -> Announcement:
    """What a worker of these settings will say that it serves, as far as it is known before its model is loaded.

    A name of limits.models that means the model, such as its name on a hub, is one of its aliases: jobs wait under it.
    Raises SettingsError for a model.path that is not under model.root.
    """
    name, *aliases = served_names(settings.model)
    waited_for = [known for known in settings.limits.model_names if names_model(known, name)]
    further = dict.fromkeys(alias for alias in (*aliases, *waited_for) if alias != name)
    return Announcement(name=name, aliases=tuple(further))


def package_version() -> str:
    """The installed version; `source` where it runs from a source tree that is not installed."""
    try:
        return metadata.version("millrace")
    except metadata.PackageNotFoundError:
        return "source"
