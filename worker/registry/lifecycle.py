"""Names the states of a unit's life: how a claim is refused, run, written and stopped, and how a prompt ends."""

from __future__ import annotations

from enum import IntEnum, StrEnum


class ClaimRefusal(StrEnum):
    """Why a unit could not be claimed. But for a suspect its message is done: the registry announces what needs it."""

    GONE = "gone"  # no such job, or it was forgotten
    TERMINAL = "terminal"  # the job or the unit is finished
    NEWER = "newer"  # a job whose fields another version of this code wrote
    BUSY = "busy"  # a live lease is on it
    SPLIT = "split"  # it crashed a worker while it ran alone, and was cut into parts that are announced by themselves
    SUSPECT = "suspect"  # it crashed a worker before: it may be claimed by who runs it alone


class RunMode(StrEnum):
    """What to do with the prompts of a unit that have no record. Values are those of the scripts."""

    RUN = "run"
    CANCELLED = "cancelled"  # the job was cancelled
    EXPIRED = "expired"  # its deadline passed
    LOST = "lost"  # the unit crashed too many workers


class PutStatus(StrEnum):
    """Where a unit stands after a write. Values are those of put.lua and fail.lua."""

    OPEN = "open"  # prompts are missing
    UNIT_DONE = "unit_done"
    JOB_DONE = "job_done"  # and with it the unit
    FENCED = "fenced"  # nothing was written


class StopReason(IntEnum):
    """Why the holder of a unit stops running it; a greater one replaces a smaller one."""

    CANCELLED = 1  # its job was cancelled: prompts without a record get one that says so
    EXPIRED = 2  # its job's deadline passed: likewise
    SENT_AWAY = 3  # a suspect is to have this worker alone: the unit goes back once the engine has let go of it
    RELEASED = 4  # this worker stops: the unit goes back, for another worker
    FAILED = 5  # what runs it raised: a defect over this unit alone; it goes back, and that counts as an attempt
    ENGINE_FAILED = 6  # engine or writer broke over it: likewise, and this worker stops
    # Another worker has the unit, or the job is over, or Redis takes no record of it: nothing more is written.
    FENCED = 7

    @classmethod
    def of_mode(cls, mode: RunMode) -> StopReason | None:
        """Why whoever runs a unit stops when it is to be run in this mode; None: there is no reason."""
        return {RunMode.CANCELLED: cls.CANCELLED, RunMode.EXPIRED: cls.EXPIRED}.get(mode)

    @property
    def closing_mode(self) -> RunMode | None:
        """What the records of the prompts that were not run say; None: they are for another worker to run."""
        if self is StopReason.CANCELLED:
            return RunMode.CANCELLED
        return RunMode.EXPIRED if self is StopReason.EXPIRED else None


class Outcome(StrEnum):
    """How a prompt ended, as the counters have it. Values are those of put.lua."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"
