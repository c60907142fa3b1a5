"""Watching a job until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from worker.cli.command_error import CommandError
from worker.cli.job_text import progress_text
from worker.cli.progress_line import ProgressLine
from worker.client import BatchClient
from worker.schemas import JobState, JobStatus

POLL_S = 0.5


def follow_job(
    client: BatchClient, job_id: str, on_change: Callable[[JobStatus], None] = lambda job: None
) -> JobStatus:
    """Poll until the job has ended, with progress on a terminal; `on_change` sees each status that differs."""
    progress = ProgressLine(sys.stderr)
    started_s, first = time.monotonic(), client.status(job_id)
    job, shown = first, None
    while True:
        if job != shown:
            on_change(job)
            shown = job
        elapsed_s = time.monotonic() - started_s
        done = job.request_counts.finished - first.request_counts.finished
        text = progress_text(job, done / elapsed_s if elapsed_s > 0 else 0.0)
        if job.status.is_terminal:
            progress.close(text)
            return job
        progress.show(text)
        time.sleep(POLL_S)
        job = client.status(job_id)


def require_completed(job: JobStatus) -> None:
    """Raise CommandError (exit 1) for a job that failed, expired or was cancelled."""
    if job.status.is_terminal and job.status is not JobState.COMPLETED:
        reason = f": {job.error}" if job.error else ""
        raise CommandError(f"job {job.id} {_ended(job.status)}{reason}")


def _ended(state: JobState) -> str:
    return {JobState.CANCELLED: "was cancelled"}.get(state, state.value)
