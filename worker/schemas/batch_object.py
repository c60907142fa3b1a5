"""A job as OpenAI's batch object."""

from __future__ import annotations

from worker.schemas.job_state import JobState
from worker.schemas.job_status import JobStatus

# The field that holds when a job ended, which names how.
_ENDED_AT = {
    JobState.COMPLETED: "completed_at",
    JobState.FAILED: "failed_at",
    JobState.EXPIRED: "expired_at",
    JobState.CANCELLED: "cancelled_at",
}


def batch_object(job: JobStatus) -> dict[str, object]:
    """The object that OpenAI's GET /v1/batches/{id} answers with, times in whole Unix seconds.

    Left out: what there is none of here (input_file_id, output_file_id, error_file_id, endpoint, completion_window,
    finalizing_at). Beyond OpenAI: results_expire_at, shards_total, shards_done, priority, tenant.
    """
    ended_at = _ENDED_AT.get(job.status)
    return {
        "id": job.id,
        "object": "batch",
        "status": job.status.value,
        "errors": None if job.error is None else _errors(job.error),
        "created_at": int(job.created_at),
        "in_progress_at": _whole(job.in_progress_at),
        "expires_at": _whole(job.expires_at),
        "cancelling_at": _whole(job.cancelling_at),
        **{name: _whole(job.finished_at) if name == ended_at else None for name in _ENDED_AT.values()},
        "request_counts": job.request_counts.model_dump(),
        "usage": {
            "input_tokens": job.usage.input_tokens,
            "input_tokens_details": {"cached_tokens": job.usage.cached_tokens},
            "output_tokens": job.usage.output_tokens,
            "total_tokens": job.usage.total_tokens,
        },
        "metadata": dict(job.metadata),
        "results_expire_at": _whole(job.results_expire_at),
        "shards_total": job.shards_total,
        "shards_done": job.shards_done,
        "priority": job.priority,
        "tenant": job.tenant,
    }


def _whole(unix_s: float | None) -> int | None:
    return None if unix_s is None else int(unix_s)


def _errors(reason: str) -> dict[str, object]:
    return {"object": "list", "data": [{"code": "batch_failed", "message": reason, "param": None, "line": None}]}
