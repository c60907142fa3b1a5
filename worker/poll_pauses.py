"""How long a producer waits between two looks at a job."""

from __future__ import annotations

import time

from worker.schemas.job_status import JobStatus

FIRST_POLL_S = 0.02
LONGEST_POLL_S = 0.5


class PollPauses:
    """Pauses that double from 20 ms to half a second, for as long as nothing is new. Sleeping is the caller's."""

    def __init__(self, timeout_s: float | None = None) -> None:
        self._timeout_s = timeout_s
        self._until_s = None if timeout_s is None else time.monotonic() + timeout_s
        self._pause_s = FIRST_POLL_S

    def next_s(self) -> float:
        """The next pause, no longer than the time that is left."""
        pause_s, self._pause_s = self._pause_s, min(self._pause_s * 2, LONGEST_POLL_S)
        return pause_s if self._until_s is None else min(pause_s, max(self._until_s - time.monotonic(), 0.0))

    def restart(self) -> None:
        """Something was new."""
        self._pause_s = FIRST_POLL_S

    def check_time(self, job: JobStatus) -> None:
        """Raise TimeoutError, which says how far the job is, if the time is up."""
        if self._until_s is not None and time.monotonic() >= self._until_s:
            raise TimeoutError(
                f"job {job.id} is {job.status} after {self._timeout_s} s: "
                f"{job.request_counts.finished} of {job.request_counts.total} prompts are done"
            )
