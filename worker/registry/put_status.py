"""Where a unit stands after a write."""

from __future__ import annotations

from enum import StrEnum


class PutStatus(StrEnum):
    """Where a unit stands after a write. Values are those of put.lua and fail.lua."""

    OPEN = "open"  # prompts are missing
    UNIT_DONE = "unit_done"
    JOB_DONE = "job_done"  # and with it the unit
    FENCED = "fenced"  # nothing was written
