"""What a worker says of its health, by what moves in it."""

from __future__ import annotations

from dataclasses import dataclass
from types import SimpleNamespace
from typing import cast

import pytest

from settings import WorkerSettings
from worker.runtime.counts import EngineMeter, QueueReader, UnitCounts
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits
from worker.runtime.lease_keeper import LeaseKeeper
from worker.runtime.supervision import Activity, Phase, SupervisedThread, Watchdog
from worker.runtime.worker_metrics import LATE_S, WatchedWorker, WorkerHealth
from worker.runtime.writer import ResultWriter


@dataclass
class Part:
    """A part of the worker, as health sees it."""

    name: str = ""
    overdue_s: float = 0.0  # of a thread's turn, of the keeper's heartbeat
    idle_overdue_s: float = 0.0
    stalled_for_s: float = 0.0
    untaken_s: float = 0.0
    has_answered: bool = True


class Worker:
    """An idle worker in which everything moves, on a clock that `after` advances."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.now_s = 1000.0
        monkeypatch.setattr("worker.runtime.supervision.time", SimpleNamespace(monotonic=lambda: self.now_s))
        self.phase: Phase = "up"
        self.activity = Activity(num_threads=1)
        self.engine, self.keeper, self.watchdog, self.reader = Part(), Part(), Part(), Part()
        self.threads = [Part(name) for name in ("lease-keeper", "result-writer", "reaper", "watchdog", "queue-reader")]
        self.num_answers = 0
        watched = WatchedWorker(
            settings=WorkerSettings(),
            describe=lambda: pytest.fail("not asked for"),
            phase=lambda: self.phase,
            activity=self.activity,
            engine=cast(EngineThread, self.engine),
            meter=EngineMeter(),
            held_units=HeldUnits(),
            keeper=cast(LeaseKeeper, self.keeper),
            counts=UnitCounts(),
            writer=cast(ResultWriter, None),
            watchdog=cast(Watchdog, self.watchdog),
            reader=cast(QueueReader, self.reader),
            threads=cast("list[SupervisedThread]", self.threads),
        )
        self.health = WorkerHealth(watched)

    def after(self, seconds: float, *, loop_turns: bool = True, redis_answers: bool = True) -> list[str]:
        """What the worker says after so many seconds."""
        for _ in range(round(seconds)):
            self.now_s += 1.0
            self.num_answers += redis_answers
            if loop_turns:
                self.activity.tick((1, self.num_answers))
        return self.health.reasons()


@pytest.fixture
def worker(monkeypatch: pytest.MonkeyPatch) -> Worker:
    worker = Worker(monkeypatch)
    worker.after(1)
    return worker


def test_a_worker_that_nobody_gives_work_is_healthy(worker: Worker) -> None:
    assert worker.after(1000) == []


@pytest.mark.parametrize("phase", ["starting", "draining", "failed"])
def test_a_worker_that_is_not_up_says_only_that(worker: Worker, phase: Phase) -> None:
    worker.phase, worker.reader.has_answered = phase, False
    assert worker.health.reasons() == [phase]


@pytest.mark.parametrize("phase", ["starting", "draining", "failed"])
def test_parts_that_begin_or_end_one_by_one_are_not_overdue(worker: Worker, phase: Phase) -> None:
    worker.threads[0].overdue_s = 30.0
    assert worker.health.overdue()["lease-keeper"] == 30.0
    worker.phase = phase
    assert worker.health.overdue() == {}


def test_before_celery_takes_messages_it_takes_none(monkeypatch: pytest.MonkeyPatch) -> None:
    assert Worker(monkeypatch).health.reasons() == ["Celery has not begun to take messages"]


def test_an_event_loop_that_does_not_turn_takes_no_message(worker: Worker) -> None:
    assert worker.after(LATE_S, loop_turns=False) == []
    assert worker.after(2, loop_turns=False) == ["consumer is 16 s late"]
    assert worker.after(1) == []


def test_an_event_loop_that_asks_redis_for_no_message_takes_none(worker: Worker) -> None:
    assert worker.after(LATE_S + 1, redis_answers=False) == []
    assert worker.after(2, redis_answers=False) == ["consumer is 16 s late"]
    assert worker.after(1) == []


def test_a_full_worker_need_not_ask_for_messages(worker: Worker) -> None:
    with worker.activity.task():
        assert worker.after(1000, redis_answers=False) == []
    assert worker.after(LATE_S + 1, redis_answers=False) == []  # it is given its time again


@pytest.mark.parametrize("number", range(5))
def test_a_thread_that_does_not_come_round_is_named(worker: Worker, number: int) -> None:
    thread = worker.threads[number]
    thread.overdue_s = LATE_S - 0.1
    assert worker.health.reasons() == []
    thread.overdue_s = LATE_S
    assert worker.health.reasons() == [f"{thread.name} is 15 s late"]


def test_an_idle_engine_that_does_not_look_for_work_is_named(worker: Worker) -> None:
    worker.engine.idle_overdue_s = 20.0
    assert worker.health.reasons() == ["engine is 20 s late"]


def test_a_step_may_take_as_long_as_its_leases_are_kept(worker: Worker) -> None:
    worker.engine.stalled_for_s = 119.0
    assert worker.health.reasons() == []
    worker.engine.stalled_for_s = 120.0
    assert worker.health.reasons() == ["a step of the engine has been running for 120 s"]


def test_a_silent_redis_and_untaken_messages_are_reasons(worker: Worker) -> None:
    worker.reader.has_answered = False
    worker.watchdog.untaken_s = 20.0
    assert worker.health.reasons() == [
        "Redis does not answer",
        "messages wait, threads are free and none was taken for 20 s",
    ]


def test_a_redis_that_answers_but_takes_no_writes_makes_it_unhealthy(worker: Worker) -> None:
    assert worker.after(5) == []
    worker.keeper.overdue_s = LATE_S
    assert worker.after(5) == ["Redis has taken no heartbeat for 15 s: is it full?"]
