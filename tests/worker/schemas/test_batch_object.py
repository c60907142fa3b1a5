from __future__ import annotations

import pytest

from worker.schemas import JobState, JobStatus, JobUsage, RequestCounts, batch_object

# The fields of OpenAI's batch object that hold times.
TIMES = {
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
}  # fmt: skip


def job(status: JobState, **fields: object) -> JobStatus:
    values: dict[str, object] = {
        "id": "s0-1",
        "status": status,
        "created_at": 100.25,
        "in_progress_at": 101.5,
        "request_counts": RequestCounts(total=10, completed=8, failed=2),
        "usage": JobUsage(input_tokens=100, cached_tokens=25, output_tokens=7, total_tokens=107),
        "shards_total": 1,
        "shards_done": 1,
        "priority": 5,
        "tenant": "default",
        "metadata": {"run": "7"},
    }
    return JobStatus.model_validate(values | fields)


@pytest.mark.parametrize(
    ("state", "field"),
    [
        (JobState.COMPLETED, "completed_at"), (JobState.FAILED, "failed_at"), (JobState.EXPIRED, "expired_at"),
        (JobState.CANCELLED, "cancelled_at"),
    ],
)  # fmt: skip
def test_the_end_stands_in_the_field_of_its_state_in_whole_seconds(state: JobState, field: str) -> None:
    shown = batch_object(job(state, finished_at=200.75, results_expire_at=300.5))

    assert (shown["object"], shown["status"]) == ("batch", state.value)
    assert {name: shown[name] for name in TIMES & shown.keys() if shown[name] is not None} == {
        "created_at": 100,
        "in_progress_at": 101,
        field: 200,
    }
    assert shown["results_expire_at"] == 300
    assert all(shown[name] is None or type(shown[name]) is int for name in TIMES & shown.keys())


def test_usage_counts_and_metadata_are_openais() -> None:
    shown = batch_object(job(JobState.IN_PROGRESS))

    assert shown["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 25},
        "output_tokens": 7,
        "total_tokens": 107,
    }
    assert shown["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
    assert shown["metadata"] == {"run": "7"}
    assert shown["errors"] is None
    assert "finished_at" not in shown


def test_the_reason_of_a_failed_job_is_its_error() -> None:
    errors = batch_object(job(JobState.FAILED, error="n is 0", finished_at=1.0))["errors"]

    assert errors == {
        "object": "list",
        "data": [{"code": "batch_failed", "message": "n is 0", "param": None, "line": None}],
    }
