"""Names the states of a unit's life: how a claim is refused, run, written and stopped, and how a prompt ends."""

from __future__ import annotations

from enum import IntEnum, StrEnum
from typing import Self


class ClaimRefusal(StrEnum):
    """Why a unit could not be claimed. Only a suspect's message is kept: the registry announces what needs it."""

    GONE = "gone"  # no such job, or it was forgotten
    TERMINAL = "terminal"  # the job or the unit is finished
    NEWER = "newer"  # a job whose fields another version of this code wrote
    BUSY = "busy"  # a live lease is on it
    OTHER_MODEL = "other_model"  # a shard of a model that this worker does not serve
    SPLIT = "split"  # it crashed a worker while it ran alone, and was cut into parts that are announced by themselves
    SUSPECT = "suspect"  # it crashed a worker before: only a worker that runs nothing else may claim it


class Outcome(StrEnum):
    """How a prompt ended, as the counters have it. Values are those of put.lua."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"


class RunMode(StrEnum):
    """What to do with the prompts of a unit that have no record. Values are those of the scripts."""

    RUN = "run"
    CANCELLED = "cancelled"  # the job was cancelled
    EXPIRED = "expired"  # its deadline passed
    LOST = "lost"  # the unit crashed too many workers

    @property
    def outcome(self) -> Outcome:
        """How these prompts end, unless they are to be run."""
        return Outcome(self.value)

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the holder of such a unit stops; None: it goes on."""
        return next((reason for reason in StopReason if reason.closing_mode is self), None)


class PutStatus(StrEnum):
    """Where a unit stands after a write. Values are those of put.lua and fail.lua."""

    OPEN = "open"  # prompts are missing
    UNIT_DONE = "unit_done"
    JOB_DONE = "job_done"  # and with it the unit
    REWOUND = "rewound"  # nothing was written, and the unit went back: Redis has lost records that it had taken
    FENCED = "fenced"  # nothing was written


class StopReason(IntEnum):
    """Why the holder of a unit stops running it; a greater one replaces a smaller one."""

    metric_label: str
    log_text: str
    closing_mode: RunMode | None  # what records of prompts that were not run say; None: another worker runs them

    # Its job was cancelled: prompts without a record get one that says so. Its deadline passed: likewise.
    CANCELLED = 1, "cancelled", "cancelled", RunMode.CANCELLED
    EXPIRED = 2, "expired", "expired", RunMode.EXPIRED
    # A suspect is to have this worker alone: the unit goes back once the engine has let go of it.
    SENT_AWAY = 3, "sent_away", "given back"
    RELEASED = 4, "released", "given back"  # this worker stops: the unit goes back, for another worker
    # What runs it raised, over this unit alone: it goes back, and that counts as an attempt.
    FAILED = 5, "failed", "failed"
    # The engine or the writer broke over it: likewise, and this worker stops.
    ENGINE_FAILED = 6, "engine_failed", "given back, the engine failed"
    # Redis has lost records of it that it had taken: it has gone back, for whoever runs what is missing.
    REWOUND = 7, "rewound", "given back, Redis lost records of it"
    # Another worker has the unit, or the job is over, or Redis takes no record of it: nothing more is written.
    FENCED = 8, "lease_lost", "no longer ours"

    def __new__(cls, value: int, metric_label: str, log_text: str, closing_mode: RunMode | None = None) -> Self:
        """A reason, with what metrics and logs say of the unit then, and how its holder closes it."""
        reason = int.__new__(cls, value)
        reason._value_, reason.metric_label, reason.log_text = value, metric_label, log_text
        reason.closing_mode = closing_mode
        return reason

    @property
    def is_error(self) -> bool:
        """Whether something went wrong."""
        return self >= StopReason.FAILED

    @property
    def is_loss(self) -> bool:
        """Whether the unit is not ours any more: nothing more is written."""
        return self >= StopReason.REWOUND
