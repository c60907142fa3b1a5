"""A worker's inner parts over a test's Redis, without Celery."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field

from celery import Celery

from settings import LimitSettings, ModelSettings, WorkerSettings
from tests.support.fake_engine import FakeEngine
from tests.support.registry import TestRegistry, must_claim
from tests.support.running_thread import running_thread
from worker.broker.messages import Announcer
from worker.registry.keys import UnitRef
from worker.registry.leases import UnitLeases
from worker.requests.served_model import ServedModel
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnit, HeldUnits
from worker.runtime.planner import Planner
from worker.runtime.shard import ShardPrompts, ShardRun
from worker.runtime.unit_runner import EngineState, ShardSlots, UnitRunner
from worker.runtime.window import AdmissionWindow
from worker.runtime.writer import ResultWriter, refused_record
from worker.unit_closer import UnitCloser


class RecordingAnnouncer(Announcer):
    """Remembers what it would have published."""

    def __init__(self) -> None:
        super().__init__(Celery(set_as_current=False))
        self.announced: list[tuple[UnitRef, int]] = []

    def announce(self, ref: UnitRef, priority: int) -> None:
        self.announced.append((ref, priority))


@dataclass
class Units:
    """Runs units on the test's own thread."""

    registry: TestRegistry
    engine: FakeEngine
    engine_thread: EngineThread
    leases: UnitLeases
    writer: ResultWriter
    failures: list[BaseException]
    announcer: RecordingAnnouncer = field(default_factory=RecordingAnnouncer)
    held_units: HeldUnits = field(default_factory=HeldUnits)
    model_name: str = "fake"

    @property
    def closer(self) -> UnitCloser:
        return UnitCloser(self.leases, LimitSettings())

    def hold(self, ref: UnitRef) -> HeldUnit:
        return self.held_units.hold(must_claim(self.leases, ref), message_id="m")

    def runner(self, *, is_well: bool = True, max_shards: int = 4) -> UnitRunner:
        return UnitRunner(
            self.leases,
            self.closer,
            self.held_units,
            give_back_for_s=0.1,
            slots=ShardSlots(self.registry.shard_queue(), self.held_units, max_shards),
            engine=EngineState(is_well=lambda: is_well, is_empty=lambda: True),
        )

    def planner(self, *, shard_size: int = 2) -> Planner:
        settings = WorkerSettings(shard_size=shard_size, result_batch_size=2)
        return Planner(
            self.leases,
            self.announcer,
            self.closer,
            settings=settings,
            limits=LimitSettings(),
            model_name=self.model_name,
        )

    def run_job(self, job_id: str) -> None:
        """Plan the job and run its shards, one after the other; all of it must be queued."""
        self.planner().plan(self.hold(UnitRef.plan(job_id)))
        for number in range(self.registry.status(job_id).shards_total):
            self.shard_run(self.hold(UnitRef.shard(job_id, number))).run()

    def shard_run(self, held: HeldUnit) -> ShardRun:
        served = ServedModel(self.engine, ModelSettings(name=self.model_name))
        prompts = ShardPrompts(held.claim, served, limits=LimitSettings())
        return ShardRun(
            held,
            prompts,
            leases=self.leases,
            engine=self.engine_thread,
            writer=self.writer,
            closer=self.closer,
        )


@contextmanager
def running_units(
    registry: TestRegistry, engine: FakeEngine | None = None, *, max_open: int = 1000, lease_s: float = 30.0
) -> Iterator[Units]:
    """Engine thread and writer, running."""
    engine = engine or FakeEngine()
    failures: list[BaseException] = []
    window = AdmissionWindow(max_open, ageing_s=60.0)
    engine_thread = EngineThread(lambda: engine, window=window, on_failure=failures.append)
    leases = registry.leases(lease_s=lease_s)
    writer = ResultWriter(leases, batch_size=10, replace_refused=refused_record)
    engine_thread.start()
    try:
        with running_thread(writer.run):
            yield Units(registry, engine, engine_thread, leases, writer, failures)
    finally:
        engine_thread.stop(5)
