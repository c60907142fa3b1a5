"""The event that tells a thread to stop."""

from __future__ import annotations

import math
import threading
import time


class StopSignal(threading.Event):
    """Tells one thread to stop. Whenever the thread asks, it shows that it still moves."""

    def __init__(self) -> None:
        super().__init__()
        self._due_at = math.inf  # time.monotonic() when it should ask again; before it first does, whenever

    @property
    def overdue_s(self) -> float:
        """How long the thread has not asked, beyond the time it said it would wait."""
        return max(0.0, time.monotonic() - self._due_at)

    def is_set(self) -> bool:
        """Whether to stop."""
        self._due_at = time.monotonic()
        return super().is_set()

    def wait(self, timeout: float | None = None) -> bool:
        """Wait so long; whether to stop."""
        self._due_at = math.inf if timeout is None else time.monotonic() + timeout
        is_set = super().wait(timeout)
        self._due_at = time.monotonic()
        return is_set
