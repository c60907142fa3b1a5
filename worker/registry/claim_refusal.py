"""Why a unit could not be claimed."""

from __future__ import annotations

from enum import StrEnum


class ClaimRefusal(StrEnum):
    """Why a unit could not be claimed. But for a suspect its message is done: the registry announces what needs it."""

    GONE = "gone"  # no such job, or it was forgotten
    TERMINAL = "terminal"  # the job or the unit is finished
    NEWER = "newer"  # a job whose fields another version of this code wrote
    BUSY = "busy"  # a live lease is on it
    SPLIT = "split"  # it crashed a worker while it ran alone, and was cut into parts that are announced by themselves
    SUSPECT = "suspect"  # it crashed a worker before: it may be claimed by who runs it alone
