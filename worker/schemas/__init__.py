"""What producers see of a job. Pure pydantic: neither torch nor the engine is imported."""

from __future__ import annotations

from worker.schemas.batch_error import BatchError
from worker.schemas.batch_object import batch_object
from worker.schemas.job_state import JobState
from worker.schemas.job_status import JobStatus
from worker.schemas.job_usage import JobUsage
from worker.schemas.request_counts import RequestCounts
from worker.schemas.submit_options import DEFAULT_PRIORITY, SubmitOptions
from worker.schemas.worker_info import WorkerInfo

__all__ = [
    "JobStatus",
    "batch_object",
    "BatchError",
    "JobState",
    "RequestCounts",
    "JobUsage",
    "SubmitOptions",
    "DEFAULT_PRIORITY",
    "WorkerInfo",
]
