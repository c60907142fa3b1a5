"""Watching a job until it ends."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable

from worker.cli.command_error import CommandError
from worker.cli.job_progress import JobProgress
from worker.client import BatchClient
from worker.schemas import JobState, JobStatus

POLL_S = 0.5


def follow_job(
    client: BatchClient,
    job_id: str,
    on_change: Callable[[JobStatus], None] = lambda job: None,
    *,
    plain_lines: bool = False,
) -> JobStatus:
    """Poll until the job has ended, with its progress on stderr, see JobProgress.

    `on_change` sees each status that differs from the one before.
    """
    progress = JobProgress(sys.stderr, plain_lines=plain_lines)
    shown = None
    while True:
        job = client.status(job_id)
        progress.show(job)
        if job != shown:
            on_change(job)
            shown = job
        if job.status.is_terminal:
            return job
        time.sleep(POLL_S)


def require_completed(job: JobStatus) -> None:
    """Raise CommandError (exit 1) for a job that failed, expired or was cancelled."""
    if job.status.is_terminal and job.status is not JobState.COMPLETED:
        reason = f": {job.error}" if job.error else ""
        raise CommandError(f"job {job.id} {_ended(job.status)}{reason}")


def _ended(state: JobState) -> str:
    return {JobState.CANCELLED: "was cancelled"}.get(state, state.value)
