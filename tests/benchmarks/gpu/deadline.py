"""When to stop."""

from __future__ import annotations

import time


class OutOfTime(Exception):
    """The time is spent; what was to be measured is not."""


class Deadline:
    """A moment in the future."""

    def __init__(self, seconds: float) -> None:
        self.seconds = seconds
        self._end = time.monotonic() + seconds

    @property
    def left_s(self) -> float:
        """Seconds until then; negative after it."""
        return self._end - time.monotonic()

    def check(self) -> None:
        """Raise OutOfTime once it has passed."""
        if self.left_s <= 0:
            raise OutOfTime(f"the {self.seconds:.0f} s are spent")
