"""Why the holder of a unit stops running it."""

from __future__ import annotations

from enum import IntEnum

from worker.registry.run_mode import RunMode


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
