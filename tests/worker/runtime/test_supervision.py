"""Threads that are watched, signals that stop a worker, and the stages of its life."""

from __future__ import annotations

import logging
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from types import SimpleNamespace
from typing import cast

import pytest
import redis
from kombu.asynchronous import Hub

from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry
from tests.support.workers import WorkerProcesses
from worker.celery_worker import worker_step
from worker.client import BatchClient
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import StopReason
from worker.registry.queues import ReapQueue
from worker.runtime.engine_thread import EngineThread
from worker.runtime.runtime import WorkerRuntime
from worker.runtime.supervision import (
    CONSUME_TIMEOUT_S,
    HUB_TIMEOUT_S,
    Activity,
    StopSignal,
    SupervisedThread,
    Watchdog,
)
from worker.schemas import JobState


class Engine:
    """What the watchdog sees of an engine's thread."""

    def __init__(self) -> None:
        self.is_idle = True
        self.num_steps = 0


class Queue:
    """The broker's lanes."""

    def __init__(self) -> None:
        self.holds_messages = False
        self.is_gone = False

    def has_messages(self) -> bool:
        if self.is_gone:
            raise redis.ConnectionError("gone")
        return self.holds_messages


class Watched:
    """A watchdog and all that it looks at."""

    def __init__(self) -> None:
        self.engine, self.queue, self.activity = Engine(), Queue(), Activity(num_threads=1)
        self.troubles: list[StopReason] = []
        self.exit_codes: list[int] = []
        self.watchdog = Watchdog(
            cast(EngineThread, self.engine),
            self.activity,
            cast(ReapQueue, self.queue),
            hang_timeout_s=300,
            on_trouble=self.troubles.append,
            exit_process=self.exit_codes.append,
        )

    def after(self, seconds: float, *, hub_turns: bool = True) -> StopReason | None:
        """The verdict once so much time has passed."""
        verdict = None
        for _ in range(round(seconds)):
            if hub_turns:
                self.activity.tick(None)
            verdict = verdict or self.watchdog.look(1.0)
        return verdict


@pytest.fixture
def watched() -> Watched:
    watched = Watched()
    watched.after(1)
    return watched


def test_an_idle_worker_is_left_alone(watched: Watched) -> None:
    assert watched.after(1000) is None


def test_a_step_that_does_not_end_is_trouble_and_counts_as_an_attempt(watched: Watched) -> None:
    watched.engine.is_idle = False
    assert watched.after(299) is None
    watched.engine.num_steps += 1
    assert watched.after(300) is None
    assert watched.after(1) is StopReason.ENGINE_FAILED


def test_an_event_loop_that_does_not_turn_is_trouble(watched: Watched) -> None:
    assert watched.after(HUB_TIMEOUT_S - 1, hub_turns=False) is None
    watched.after(1)
    assert watched.after(HUB_TIMEOUT_S, hub_turns=False) is StopReason.RELEASED


def test_an_event_loop_stands_still_while_redis_cannot_be_had(watched: Watched) -> None:
    watched.queue.is_gone = True
    assert watched.after(1000, hub_turns=False) is None
    watched.queue.is_gone = False
    assert watched.after(HUB_TIMEOUT_S - 1, hub_turns=False) is None


def test_an_event_loop_that_never_began_is_not_waited_for() -> None:
    assert Watched().after(1000, hub_turns=False) is None


def test_messages_that_nobody_takes_are_trouble(watched: Watched) -> None:
    watched.queue.holds_messages = True
    assert watched.after(CONSUME_TIMEOUT_S - 1) is None
    with watched.activity.task():
        watched.after(1)
    assert watched.after(CONSUME_TIMEOUT_S - 1) is None
    assert watched.after(1) is StopReason.RELEASED


def test_a_full_worker_need_not_take_messages(watched: Watched) -> None:
    watched.queue.holds_messages = True
    with watched.activity.task():
        assert watched.after(1000) is None


def test_time_in_which_the_process_was_stopped_does_not_count(
    watched: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("worker.runtime.supervision.LOOK_INTERVAL_S", 0.01)
    now_s, has_looked = 0.0, threading.Event()

    def after_long_pauses() -> float:
        nonlocal now_s
        now_s += 1000
        if now_s > 20_000:
            has_looked.set()
        return now_s

    monkeypatch.setattr(time, "monotonic", after_long_pauses)
    watched.engine.is_idle = False
    with running_thread(watched.watchdog.run):
        assert has_looked.wait(10)
    assert watched.troubles == []


def test_trouble_ends_the_process_even_if_nothing_else_does(watched: Watched, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("worker.runtime.supervision.LOOK_INTERVAL_S", 0.01)
    monkeypatch.setattr("worker.runtime.supervision.HUB_TIMEOUT_S", 0.03)
    monkeypatch.setattr("worker.runtime.supervision.EXIT_TIMEOUT_S", 0.05)
    with running_thread(watched.watchdog.run):
        wait_until(lambda: watched.exit_codes)
    assert watched.troubles == [StopReason.RELEASED]
    assert watched.exit_codes == [70]


def test_a_worker_whose_engine_hangs_exits_70_and_another_takes_over(
    workers: WorkerProcesses, registry: TestRegistry, redis_url: str
) -> None:
    hanging = workers.start(engine={"step_s": 600}, worker__hang_timeout_s="2")
    with BatchClient(redis_url) as client:
        workers.wait_up(client)
        job_id = client.submit([{"prompt": f"prompt {number}"} for number in range(30)])
        shard = registry.keys.unit(UnitRef.shard(job_id, 0))
        wait_until(lambda: registry.redis.hget(shard, "st") == b"running")
        workers.start()
        assert client.wait(job_id, 30).status is JobState.COMPLETED
    assert hanging.wait(20) == 70
    assert "a step of the engine has not ended for 2 s" in workers.log()


def test_a_worker_is_full_while_every_thread_has_a_task() -> None:
    activity = Activity(num_threads=2)
    found = []
    with ExitStack() as stack:
        for _ in range(2):
            stack.enter_context(activity.task())
            found.append(activity.is_full)
    assert [*found, activity.is_full] == [False, True, False]
    assert activity.num_received == 2


def test_a_task_that_fails_frees_its_thread() -> None:
    activity = Activity(num_threads=1)
    with pytest.raises(ZeroDivisionError), activity.task():
        raise ZeroDivisionError
    assert not activity.is_full


def _wait(stopping: threading.Event) -> None:
    stopping.wait()


def test_it_runs_until_it_is_told_to_stop() -> None:
    failures: list[BaseException] = []
    thread = SupervisedThread("looping", _wait, on_failure=failures.append)
    thread.start()
    assert thread.stop(30)
    assert failures == []


def test_one_that_does_not_stop_is_told_of() -> None:
    release = threading.Event()
    thread = SupervisedThread("stuck", lambda _stopping: _wait(release), on_failure=lambda _: None)
    thread.start()
    assert not thread.stop(0.05)
    release.set()
    assert thread.stop(30)


def test_what_it_raises_is_logged_and_handed_on(caplog: pytest.LogCaptureFixture) -> None:
    failures: list[BaseException] = []
    error = ZeroDivisionError("a defect")

    def run(_stopping: threading.Event) -> None:
        raise error

    thread = SupervisedThread("broken", run, on_failure=failures.append)
    with caplog.at_level(logging.ERROR):
        thread.start()
        wait_until(lambda: failures)
    assert failures == [error]
    assert "the thread broken broke" in caplog.text
    assert "a defect" in caplog.text
    assert thread.stop(30)


class Clock:
    """Stands still until it is told otherwise."""

    now_s = 1000.0

    def monotonic(self) -> float:
        return self.now_s


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("worker.runtime.supervision.time", clock)
    return clock


def test_before_its_thread_first_asks_nothing_is_overdue(clock: Clock) -> None:
    signal = StopSignal()
    clock.now_s += 1000
    assert signal.overdue_s == 0


def test_work_between_two_looks_is_overdue_time(clock: Clock) -> None:
    signal = StopSignal()
    assert not signal.is_set()
    clock.now_s += 7
    assert signal.overdue_s == 7
    assert not signal.wait(0)
    assert signal.overdue_s == 0


def test_a_wait_may_last_as_long_as_it_says(clock: Clock) -> None:
    signal = StopSignal()
    signal.is_set()
    with ThreadPoolExecutor() as pool:
        waiting = pool.submit(signal.wait, 60)
        clock.now_s += 1
        wait_until(lambda: signal.overdue_s == 0)  # it waits
        clock.now_s += 60
        assert signal.overdue_s <= 1  # 0 if it began to wait before the clock went on
        clock.now_s += 5
        assert 5 <= signal.overdue_s <= 6
        signal.set()
        assert waiting.result(20)
    assert signal.overdue_s == 0


class Runtime:
    """What a step calls."""

    def __init__(self) -> None:
        self.has_started = False
        self.answers: list[object] = []

    def start(self) -> None:
        self.has_started = True

    def tick(self, num_answers: object) -> None:
        self.answers.append(num_answers)


def test_celerys_event_loop_gives_a_sign_of_life_while_it_turns() -> None:
    runtime = Runtime()
    hub = Hub()
    channel = SimpleNamespace(num_answers=3)
    consumer = SimpleNamespace(task_consumer=SimpleNamespace(channel=channel))
    parent = SimpleNamespace(hub=hub, steps=[], consumer=consumer)
    worker_step(cast(WorkerRuntime, runtime))(parent).start(parent)
    assert runtime.has_started
    loop = hub.create_loop()
    wait_until(lambda: next(loop) or runtime.answers)
    consumer.task_consumer = None  # while it connects anew
    wait_until(lambda: next(loop) or len(runtime.answers) > 1)
    hub.close()
    assert runtime.answers == [(id(channel), 3), None]


def test_a_celery_without_an_event_loop_starts_as_well() -> None:
    runtime = Runtime()
    parent = SimpleNamespace(hub=None, steps=[])
    worker_step(cast(WorkerRuntime, runtime))(parent).start(parent)
    assert runtime.has_started
