"""Where a job is in its life."""

from __future__ import annotations

from enum import StrEnum


class JobState(StrEnum):
    """The OpenAI Batch API's states, less `finalizing`: here a job ends with its last record.

        validating -> in_progress -> completed
             |             |-> expired     its deadline passed: what is unfinished gets batch_expired records
             |             `-> cancelling -> cancelled
             `-> failed    it was refused, or planning it crashed worker after worker

    `completed` does not mean that every prompt succeeded: see the counts.
    """

    VALIDATING = "validating"
    IN_PROGRESS = "in_progress"
    CANCELLING = "cancelling"
    COMPLETED = "completed"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    FAILED = "failed"

    @property
    def is_terminal(self) -> bool:
        """Whether the job will not change any more."""
        return self in (JobState.COMPLETED, JobState.CANCELLED, JobState.EXPIRED, JobState.FAILED)
