"""Ends a worker that lives and does not work: its state, threads that cannot end unnoticed, activity, a watchdog."""

from __future__ import annotations

import logging
import math
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal

import redis

from worker.registry.lifecycle import StopReason
from worker.registry.queues import ReapQueue
from worker.runtime.engine_thread import EngineThread
from worker.runtime.held_units import HeldUnits

Phase = Literal["starting", "up", "draining", "failed"]

logger = logging.getLogger(__name__)

TICK_INTERVAL_S = 1.0  # between two calls of Activity.tick by Celery's event loop
# Celery has Redis answer BRPOP after a second if there is no message: an answer shows that it asks for messages.
ANSWER_INTERVAL_S = 1.0

LOOK_INTERVAL_S = 1.0
# Twice the longest wait between two of Celery's tries to connect, during which its event loop stands still.
HUB_TIMEOUT_S = 60.0
CONSUME_TIMEOUT_S = 60.0
# For the orderly end: 37 s at most (WorkerRuntime.stop), if the main thread still takes part in it.
EXIT_TIMEOUT_S = 45.0


class WorkerState:
    """Which phase this worker is in, and what is done when the engine or a thread around it breaks."""

    def __init__(self, held_units: HeldUnits, *, drain: Callable[[], None], on_failure: Callable[[], None]) -> None:
        self.phase: Phase = "starting"
        self._held_units = held_units
        self._drain = drain  # claims no more units
        self._on_failure = on_failure  # has this process end
        self.has_failed = False  # the engine, or a thread around it, broke

    @property
    def shown_phase(self) -> Phase:
        """The phase; `failed` from when something broke, also while the worker stops."""
        return "failed" if self.has_failed else self.phase

    def engine_failed(self, _error: BaseException) -> None:
        """The engine broke."""
        self.fail(StopReason.ENGINE_FAILED)

    def writer_failed(self, _error: BaseException) -> None:
        """The result writer broke, perhaps over a record: that counts as an attempt, or its unit would never end."""
        self.fail(StopReason.ENGINE_FAILED)

    def thread_failed(self, _error: BaseException) -> None:
        """Another thread broke, which the held units did not cause: it costs them no attempt."""
        self.fail(StopReason.RELEASED)

    def fail(self, reason: StopReason) -> None:
        """Give the held units back and end this process; called on the thread that broke."""
        self.has_failed = True
        self._drain()
        self._held_units.stop_all(reason)
        self._on_failure()


class SupervisedThread:
    """A thread that runs `run` until told to stop; what `run` raises is logged and handed to `on_failure`.

    `run` gets the event that tells it to stop, which it must ask at least once a round: see StopSignal. A daemon, so
    that a thread that hangs does not keep the process from exiting.
    """

    def __init__(
        self, name: str, run: Callable[[threading.Event], None], *, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._run = run
        self._on_failure = on_failure  # called on this thread
        self._stopping = StopSignal()
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    @property
    def overdue_s(self) -> float:
        """How long past its time it has not come round; see StopSignal."""
        return self._stopping.overdue_s

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Tell it to stop and wait for its end; False if that takes longer."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        try:
            self._run(self._stopping)
        except Exception as error:  # a seam: a worker without this thread looks healthy and is not
            logger.exception("the thread %s broke", self._thread.name)
            self._on_failure(error)


class StopSignal(threading.Event):
    """Tells one thread to stop; by asking, the thread shows that it still moves."""

    def __init__(self) -> None:
        super().__init__()
        self._due_at = math.inf  # time.monotonic() by which it should ask again; no limit before it first does

    @property
    def overdue_s(self) -> float:
        """How long the thread has not asked, beyond the time that it meant to wait."""
        return max(0.0, time.monotonic() - self._due_at)

    def is_set(self) -> bool:
        """Whether to stop."""
        self._due_at = time.monotonic()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait at most `timeout` seconds; whether to stop."""
        self._due_at = math.inf if timeout is None else time.monotonic() + timeout
        is_set = super().wait(timeout)
        self._due_at = time.monotonic()
        return is_set


class Activity:
    """Counts what Celery does in this process, for watchdog and health. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self.num_ticks = 0  # turns of Celery's event loop, about one a second; 0 before it began
        self.num_received = 0  # tasks begun
        self._num_threads = num_threads  # of Celery's pool
        self._lock = threading.Lock()
        self._num_running = 0
        self._ticked_at = time.monotonic()
        self._answered_at = time.monotonic()
        self._num_answers: object = None

    @property
    def is_full(self) -> bool:
        """Whether every thread has a task."""
        return self._num_running >= self._num_threads

    @property
    def tick_overdue_s(self) -> float:
        """How long past its time the event loop has not turned."""
        return max(0.0, time.monotonic() - self._ticked_at - TICK_INTERVAL_S)

    @property
    def answer_overdue_s(self) -> float:
        """How long past its time Redis has not answered Celery, while a thread was free for a message."""
        return max(0.0, time.monotonic() - self._answered_at - TICK_INTERVAL_S - ANSWER_INTERVAL_S)

    def tick(self, num_answers: object) -> None:
        """Note a turn of the event loop. `num_answers` changes with each answer of Redis about messages."""
        self.num_ticks += 1
        self._ticked_at = time.monotonic()
        if num_answers != self._num_answers or self.is_full:
            self._answered_at = self._ticked_at
        self._num_answers = num_answers

    @contextmanager
    def task(self) -> Iterator[None]:
        """Count a task as running within the block."""
        with self._lock:
            self.num_received += 1
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1


class Watchdog:
    """Looks every second whether Celery's event loop turns, the engine's step ends and waiting messages are taken.

    When one of these has stood still for too long, the units are given back and the process exits with 70, for a
    supervisor to start another. Only time in which the watchdog itself ran counts, so that a process that was stopped
    and goes on gets another chance. While Redis is away Celery may stand still.
    """

    def __init__(
        self,
        engine: EngineThread,
        activity: Activity,
        queue: ReapQueue,
        *,
        hang_timeout_s: float,
        on_trouble: Callable[[StopReason], None],
        exit_process: Callable[[int], None] = os._exit,
    ) -> None:
        self._engine = engine
        self._activity = activity
        self._queue = queue
        self._hang_timeout_s = hang_timeout_s
        self._on_trouble = on_trouble  # gives the units back for this reason, and asks the process to end
        self._exit_process = exit_process
        self._seen = (0, 0, 0)  # ticks, steps, tasks at the last look
        self._hub_still_s = 0.0
        self._engine_still_s = 0.0
        self.untaken_s = 0.0  # how long messages have waited beside free threads with none taken

    def run(self, stopping: threading.Event) -> None:
        """Look until told to stop, or until there is trouble."""
        interval_s = min(LOOK_INTERVAL_S, self._hang_timeout_s / 4)
        looked_at = time.monotonic()
        while not stopping.wait(interval_s):
            now = time.monotonic()
            reason = self.look(min(now - looked_at, 2 * interval_s))
            looked_at = now
            if reason is not None:
                self._end(reason)
                return

    def look(self, elapsed_s: float) -> StopReason | None:
        """Look, `elapsed_s` seconds after the last time; why the units must be given back, or None."""
        num_ticks, num_steps, num_received = self._seen
        activity, engine = self._activity, self._engine
        self._seen = (activity.num_ticks, engine.num_steps, activity.num_received)
        is_engine_still = not engine.is_idle and engine.num_steps == num_steps
        is_hub_still = activity.num_ticks == num_ticks > 0
        takes_nothing = activity.num_received == num_received and not activity.is_full
        has_messages = self._has_messages() if is_hub_still or takes_nothing else False
        is_untaken = takes_nothing and has_messages is True
        self._engine_still_s = self._engine_still_s + elapsed_s if is_engine_still else 0.0
        self._hub_still_s = self._hub_still_s + elapsed_s if is_hub_still and has_messages is not None else 0.0
        self.untaken_s = self.untaken_s + elapsed_s if is_untaken else 0.0
        return self._verdict()

    def _verdict(self) -> StopReason | None:
        if self._engine_still_s >= self._hang_timeout_s:
            logger.error("a step of the engine has not ended for %.0f s", self._engine_still_s)
            # A unit in that step is a suspect, or guilty if it ran alone.
            return StopReason.ENGINE_FAILED
        if self._hub_still_s >= HUB_TIMEOUT_S:
            logger.error("Celery's event loop has not turned for %.0f s", self._hub_still_s)
            return StopReason.RELEASED
        if self.untaken_s >= CONSUME_TIMEOUT_S:
            logger.error("messages wait, threads are free and none was taken for %.0f s", self.untaken_s)
            return StopReason.RELEASED
        return None

    def _has_messages(self) -> bool | None:
        """None if Redis cannot be had."""
        try:
            return self._queue.has_messages()
        except redis.RedisError:
            return None

    def _end(self, reason: StopReason) -> None:
        last_chance = threading.Timer(EXIT_TIMEOUT_S, self._exit_process, (os.EX_SOFTWARE,))
        last_chance.daemon = True
        last_chance.start()
        self._on_trouble(reason)
