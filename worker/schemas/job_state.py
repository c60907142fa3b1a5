"""Where a job is in its life."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """The OpenAI Batch API's states.

        validating -> in_progress -> completed
             |             |-> finalizing -> expired     its deadline passed: the rest gets batch_expired records
             |             `-> cancelling -> cancelled
             `-> failed    it was refused, or planning it crashed worker after worker

    `finalizing` is seen only on the way to `expired`: a job completes with its last record, there is nothing left to
    be done then. A deadline or a cancellation may come while a job is validating too. `completed` does not mean that
    every prompt succeeded: see the counts.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    FINALIZING = "finalizing"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether the job will not change any more."""
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED)
