"""What to do with a claimed unit."""

from __future__ import annotations

from enum import StrEnum


class RunMode(StrEnum):
    """What to do with the prompts of a unit that have no record. Values are those of the scripts."""

    RUN = "run"
    CANCELLED = "cancelled"  # the job was cancelled
    EXPIRED = "expired"  # its deadline passed
    LOST = "lost"  # the unit crashed too many workers
