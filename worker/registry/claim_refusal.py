"""Why a unit could not be claimed."""

from __future__ import annotations

from enum import StrEnum


class ClaimRefusal(StrEnum):
    """Why a unit could not be claimed. In each case its message is done: the registry announces what needs it."""

    GONE = "gone"  # no such job, or it was forgotten
    TERMINAL = "terminal"  # the job or the unit is finished
    BUSY = "busy"  # a live lease is on it
