"""What metrics and health look at."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

from settings import WorkerSettings
from worker.metrics.engine_meter import EngineMeter
from worker.metrics.queue_reader import QueueReader
from worker.metrics.unit_counts import UnitCounts
from worker.process.activity import Activity
from worker.process.engine_thread import EngineThread
from worker.process.held_units import HeldUnits
from worker.process.lease_keeper import LeaseKeeper
from worker.process.result_writer import ResultWriter
from worker.process.supervised_thread import SupervisedThread
from worker.process.watchdog import Watchdog
from worker.schemas.worker_info import WorkerInfo

Phase = Literal["starting", "up", "draining", "failed"]


@dataclass(frozen=True, slots=True)
class WatchedWorker:
    """The parts of a worker, each of which may be asked from any thread and answers at once."""

    settings: WorkerSettings
    describe: Callable[[], WorkerInfo]
    phase: Callable[[], Phase]
    activity: Activity
    engine: EngineThread
    meter: EngineMeter
    held_units: HeldUnits
    keeper: LeaseKeeper
    counts: UnitCounts
    writer: ResultWriter
    watchdog: Watchdog
    reader: QueueReader
    threads: Sequence[SupervisedThread]  # all of them, the reader's and the watchdog's too
