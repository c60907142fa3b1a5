"""Ending a worker that lives and does not work."""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable

import redis

from worker.process.activity import Activity
from worker.process.engine_thread import EngineThread
from worker.registry.reap_queue import ReapQueue
from worker.registry.stop_reason import StopReason

LOOK_INTERVAL_S = 1.0
# Twice the longest wait between two of Celery's tries to connect, during which its event loop stands still.
HUB_TIMEOUT_S = 60.0
CONSUME_TIMEOUT_S = 60.0
# For the orderly end: 37 s at most (WorkerRuntime.stop), if the main thread still takes part in it.
EXIT_TIMEOUT_S = 45.0

logger = logging.getLogger(__name__)


class Watchdog:
    """Looks every second whether Celery's event loop turns, whether the engine's step ends, whether messages that wait
    are taken. If not for too long, it has the units given back, and the process end with 70 for a supervisor.

    Only time in which the watchdog itself could look counts: a process that was stopped and goes on is given another
    chance, and Redis that cannot be had excuses Celery.
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
        self._untaken_s = 0.0

    @property
    def untaken_s(self) -> float:
        """How long messages have waited beside free threads with none taken, as of the last look."""
        return self._untaken_s

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
        """Why the units must be given back, if they must, `elapsed_s` seconds after the last look."""
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
        self._untaken_s = self._untaken_s + elapsed_s if is_untaken else 0.0
        return self._verdict()

    def _verdict(self) -> StopReason | None:
        if self._engine_still_s >= self._hang_timeout_s:
            logger.error("a step of the engine has not ended for %.0f s", self._engine_still_s)
            # Whoever is in it is a suspect, or guilty if it is alone.
            return StopReason.ENGINE_FAILED
        if self._hub_still_s >= HUB_TIMEOUT_S:
            logger.error("Celery's event loop has not turned for %.0f s", self._hub_still_s)
            return StopReason.RELEASED
        if self._untaken_s >= CONSUME_TIMEOUT_S:
            logger.error("messages wait, threads are free and none was taken for %.0f s", self._untaken_s)
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
