"""The rows of one expert."""

from __future__ import annotations

from typing import NamedTuple


class ExpertRun(NamedTuple):
    """Rows `start` .. `end` - 1 of an `ExpertLayout`, at least one, are those of one expert."""

    expert: int
    start: int
    end: int

    @property
    def num_rows(self) -> int:
        """At least 1."""
        return self.end - self.start
