"""A job as OpenAI's batch object."""

from __future__ import annotations

from worker.records.batch_file import BatchFile
from worker.schemas.job_state import JobState
from worker.schemas.job_status import JobStatus

# The field that holds when a job ended, which names how.
_ENDED_AT = {
    JobState.COMPLETED: "completed_at",
    JobState.FAILED: "failed_at",
    JobState.EXPIRED: "expired_at",
    JobState.CANCELLED: "cancelled_at",
}
_UNITS_S = {"h": 3_600, "m": 60, "s": 1}  # hours at most: OpenAI's one window is called 24h


def batch_object(job: JobStatus) -> dict[str, object]:
    """The object that OpenAI's GET /v1/batches/{id} answers with, all fields of its type, times in whole Unix seconds.

    Where ours says more or other things: `endpoint` may hold several, comma separated, and is "" until the job is
    planned; `completion_window` is the deadline as a duration such as 24h, or "none". The file ids are there once the
    job has ended, and only of a file that has lines. Beyond OpenAI: results_expire_at, shards_total, shards_done,
    priority, tenant.
    """
    counts, has_ended = job.request_counts, job.status.is_terminal
    ended_at = _ENDED_AT.get(job.status)
    return {
        "id": job.id,
        "object": "batch",
        "endpoint": job.endpoint,
        "model": job.model,
        "errors": _errors(job),
        "input_file_id": BatchFile.INPUT.id_of(job.id),
        "completion_window": _window(job),
        "status": job.status.value,
        "output_file_id": BatchFile.OUTPUT.id_of(job.id) if has_ended and counts.completed else None,
        "error_file_id": BatchFile.ERROR.id_of(job.id) if has_ended and counts.failed else None,
        "created_at": int(job.created_at),
        "in_progress_at": _whole(job.in_progress_at),
        "expires_at": _whole(job.expires_at),
        "finalizing_at": _whole(_finalizing_at(job)),
        "cancelling_at": _whole(job.cancelling_at),
        **{name: _whole(job.finished_at) if name == ended_at else None for name in _ENDED_AT.values()},
        "request_counts": counts.model_dump(),
        "usage": _usage(job),
        "metadata": dict(job.metadata),
        "results_expire_at": _whole(job.results_expire_at),
        "shards_total": job.shards_total,
        "shards_done": job.shards_done,
        "priority": job.priority,
        "tenant": job.tenant,
    }


def _usage(job: JobStatus) -> dict[str, object]:
    usage = job.usage
    return {
        "input_tokens": usage.input_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens},
        "output_tokens": usage.output_tokens,
        "output_tokens_details": {"reasoning_tokens": usage.reasoning_tokens},
        "total_tokens": usage.total_tokens,
    }


def _errors(job: JobStatus) -> dict[str, object] | None:
    if not job.errors:
        return None
    return {"object": "list", "data": [error.model_dump() for error in job.errors]}


def _finalizing_at(job: JobStatus) -> float | None:
    """A job completes in the moment of its last record; one that expires is finalised from its deadline on."""
    if job.status is JobState.COMPLETED:
        return job.finished_at
    return job.expires_at if job.status in (JobState.FINALIZING, JobState.EXPIRED) else None


def _window(job: JobStatus) -> str:
    if job.expires_at is None:
        return "none"
    seconds = max(round(job.expires_at - job.created_at), 1)
    unit = next(unit for unit, unit_s in _UNITS_S.items() if seconds % unit_s == 0)
    return f"{seconds // _UNITS_S[unit]}{unit}"


def _whole(unix_s: float | None) -> int | None:
    return None if unix_s is None else int(unix_s)
