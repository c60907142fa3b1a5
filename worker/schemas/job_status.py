"""A job as its producer sees it."""

from __future__ import annotations

from collections.abc import Mapping

from pydantic import BaseModel, ConfigDict

from worker.schemas.batch_error import BatchError
from worker.schemas.job_state import JobState
from worker.schemas.job_usage import JobUsage
from worker.schemas.request_counts import RequestCounts


class JobStatus(BaseModel):
    """A snapshot of one job. Times are Unix seconds by Redis' clock, with their fractions.

    `batch_object` turns it into OpenAI's batch object, which is what the command line prints as JSON.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    id: str
    status: JobState
    endpoint: str = ""  # the one it was submitted for, else those its lines name, comma separated; "": not yet known
    model: str | None = None  # the one its lines name, else the worker's; None: not yet known, or they name several
    created_at: float
    in_progress_at: float | None = None  # its shards were cut
    expires_at: float | None = None  # its deadline
    cancelling_at: float | None = None
    finished_at: float | None = None  # when it reached a terminal state, whichever
    results_expire_at: float | None = None  # when a finished job and its results are forgotten
    request_counts: RequestCounts
    usage: JobUsage
    shards_total: int  # 0 until it is planned
    shards_done: int
    priority: int
    tenant: str
    metadata: Mapping[str, str]
    error: str | None = None  # why it failed as a whole
    errors: tuple[BatchError, ...] = ()  # the same in parts, for programs; bad lines beyond the first hundred left out

    @property
    def progress(self) -> float:
        """Share of the prompts that have their record, 0 to 1."""
        return self.request_counts.finished / self.request_counts.total if self.request_counts.total else 1.0
