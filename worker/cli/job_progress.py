"""A job's progress while somebody waits for it."""

from __future__ import annotations

import time
from typing import TextIO

from worker.cli.job_rates import JobRates
from worker.cli.job_text import progress_text
from worker.cli.progress_line import ProgressLine
from worker.schemas import JobState, JobStatus

PLAIN_EVERY_S = 10.0


class JobProgress:
    """A bar on a terminal; elsewhere, with `plain_lines`, a line every ten seconds and for each state of the job."""

    def __init__(self, stream: TextIO, *, plain_lines: bool) -> None:
        self._stream = stream
        self._line = ProgressLine(stream)
        self._is_plain = plain_lines and not stream.isatty()
        self._rates = JobRates()
        self._printed_at_s = float("-inf")
        self._printed_state: JobState | None = None

    def show(self, job: JobStatus) -> None:
        """The job as it stands now: call it often."""
        now_s = time.monotonic()
        self._rates.add(job, now_s)
        text = progress_text(job, self._rates)
        if job.status.is_terminal:
            self._line.close(text, job.progress)
        else:
            self._line.show(text, job.progress)
        is_due = job.status is not self._printed_state or now_s - self._printed_at_s >= PLAIN_EVERY_S
        if self._is_plain and is_due:
            self._stream.write(f"{text}\n")
            self._stream.flush()
            self._printed_at_s, self._printed_state = now_s, job.status
