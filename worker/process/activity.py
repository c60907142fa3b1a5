"""Signs that a worker takes part."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

TICK_INTERVAL_S = 1.0  # between two turns of Celery's event loop that are told here
# Celery has Redis answer BRPOP after a second if there is no message: an answer shows that it asks for messages.
ANSWER_INTERVAL_S = 1.0


class Activity:
    """Counts what Celery does in this process, for watchdog and health. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads  # of Celery's pool
        self._lock = threading.Lock()
        self._num_ticks = 0
        self._num_received = 0
        self._num_running = 0
        self._ticked_at = time.monotonic()
        self._answered_at = time.monotonic()
        self._num_answers: object = None

    @property
    def num_ticks(self) -> int:
        """Turns of Celery's event loop, about one a second; 0 before it began."""
        return self._num_ticks

    @property
    def num_received(self) -> int:
        """Tasks begun."""
        return self._num_received

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
        """How long past its time Redis has answered no question for messages, while a thread was free for one."""
        return max(0.0, time.monotonic() - self._answered_at - TICK_INTERVAL_S - ANSWER_INTERVAL_S)

    def tick(self, num_answers: object) -> None:
        """The event loop turns. `num_answers`: another value whenever Redis has answered a question for messages."""
        self._num_ticks += 1
        self._ticked_at = time.monotonic()
        if num_answers != self._num_answers or self.is_full:
            self._answered_at = self._ticked_at
        self._num_answers = num_answers

    @contextmanager
    def task(self) -> Iterator[None]:
        """For as long as a task runs."""
        with self._lock:
            self._num_received += 1
            self._num_running += 1
        try:
            yield
        finally:
            with self._lock:
                self._num_running -= 1
