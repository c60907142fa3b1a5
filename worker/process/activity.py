"""Signs that a worker takes part."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager


class Activity:
    """Counts what Celery does in this process, for the watchdog. Thread-safe."""

    def __init__(self, num_threads: int) -> None:
        self._num_threads = num_threads  # of Celery's pool
        self._lock = threading.Lock()
        self._num_ticks = 0
        self._num_received = 0
        self._num_running = 0

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

    def tick(self) -> None:
        """The event loop turns."""
        self._num_ticks += 1

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
