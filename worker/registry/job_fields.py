"""A job's hash, read."""

from __future__ import annotations

import json
from collections.abc import Mapping

from worker.broker.untyped import Untyped
from worker.registry.redis_reply import text_fields
from worker.schemas.batch_error import BatchError
from worker.schemas.job_state import JobState
from worker.schemas.job_status import JobStatus
from worker.schemas.job_usage import JobUsage
from worker.schemas.request_counts import RequestCounts

_STATES = {
    "queued": JobState.VALIDATING,
    "running": JobState.IN_PROGRESS,
    "done": JobState.COMPLETED,
    "cancelled": JobState.CANCELLED,
    "expired": JobState.EXPIRED,
    "failed": JobState.FAILED,
    "refused": JobState.FAILED,
}


def job_status(job_id: str, fields: Mapping[Untyped, Untyped]) -> JobStatus:
    """The job as it stands, of the fields of its hash."""
    job = text_fields(fields)
    finished_at = _seconds(job["fin"])
    prompt_tokens, output_tokens = int(job["tokp"]), int(job["toko"])
    return JobStatus(
        id=job_id,
        status=_state(job),
        endpoint=job.get("url") or job.get("urls", ""),
        model=job.get("model") or None,
        created_at=int(job["created"]) / 1000,
        in_progress_at=_seconds(job["started"]),
        expires_at=_seconds(job["deadline"]),
        cancelling_at=_seconds(job["cancel"]),
        finished_at=finished_at,
        results_expire_at=None if finished_at is None else finished_at + int(job["retain"]) / 1000,
        request_counts=RequestCounts(total=int(job["n"]), completed=int(job["ok"]), failed=int(job["err"])),
        usage=JobUsage(
            input_tokens=prompt_tokens,
            cached_tokens=int(job["tokc"]),
            output_tokens=output_tokens,
            resumed_tokens=int(job.get("tokr", 0)),
            reasoning_tokens=int(job.get("tokt", 0)),
            total_tokens=prompt_tokens + output_tokens,
        ),
        shards_total=int(job["ns"]),
        shards_done=int(job["sd"]),
        priority=int(job["pri"]),
        tenant=job["tenant"],
        metadata=json.loads(job["spec"]).get("metadata", {}),
        error=job["reason"] or None,
        errors=_errors(job),
    )


def _state(job: Mapping[str, str]) -> JobState:
    state = _STATES[job["st"]]
    if state.is_terminal:
        return state
    if job["cancel"] != "0":
        return JobState.CANCELLING
    # A record that says batch_expired: the deadline has passed, and the others are on their way.
    return JobState.FINALIZING if job["exp"] != "0" else state


def _errors(job: Mapping[str, str]) -> tuple[BatchError, ...]:
    if "errors" in job:
        return tuple(BatchError.model_validate(error) for error in json.loads(job["errors"]))
    return (BatchError(code="batch_failed", message=job["reason"]),) if job["reason"] else ()


def _seconds(milliseconds: str) -> float | None:
    return None if milliseconds == "0" else int(milliseconds) / 1000
