"""Monotonic times as times of day."""

from __future__ import annotations

import time


class SpanClock:
    """Turns time.monotonic() of this process into nanoseconds since 1970, by what the clock says when it is made.

    One for each span and those under it: their order holds, whatever is done to the clock meanwhile.
    """

    def __init__(self) -> None:
        self._offset_ns = time.time_ns() - time.monotonic_ns()

    def at_ns(self, monotonic_s: float) -> int:
        """Nanoseconds since 1970 at a monotonic time."""
        return self._offset_ns + round(monotonic_s * 1e9)

    def now_ns(self) -> int:
        """Nanoseconds since 1970."""
        return self._offset_ns + time.monotonic_ns()
