"""Batch objects and batch files as OpenAI's client reads them."""

from __future__ import annotations

import pytest
from openai.types import Batch

from worker.lines.errors import LineError
from worker.records.failure import Unfinished, line_error_record, unfinished_record
from worker.records.record import BatchFile, RecordContext
from worker.schemas import BatchError, JobState, JobStatus, JobUsage, RequestCounts, batch_object

# The fields of OpenAI's batch object that hold times.
TIMES = {
    "created_at", "in_progress_at", "expires_at", "finalizing_at", "completed_at", "failed_at", "expired_at",
    "cancelling_at", "cancelled_at",
}  # fmt: skip

CONTEXT = RecordContext("s0-1", "tiny", created_s=1_700_000_000)


def job(status: JobState, **fields: object) -> JobStatus:
    values: dict[str, object] = {
        "id": "s0-1",
        "status": status,
        "created_at": 100.25,
        "in_progress_at": 101.5,
        "request_counts": RequestCounts(total=10, completed=8, failed=2),
        "usage": JobUsage(input_tokens=100, cached_tokens=25, output_tokens=7, reasoning_tokens=3, total_tokens=107),
        "shards_total": 1,
        "shards_done": 1,
        "priority": 5,
        "tenant": "default",
        "metadata": {"run": "7"},
    }
    return JobStatus.model_validate(values | fields)


@pytest.mark.parametrize("status", JobState)
def test_the_object_is_openais_type_in_every_state(status: JobState) -> None:
    finished_at = 200.75 if status.is_terminal else None
    shown = batch_object(job(status, finished_at=finished_at, expires_at=150.0, cancelling_at=160.0))

    parsed = Batch.model_validate(shown, strict=True)

    assert Batch.model_fields.keys() <= shown.keys()
    assert parsed.status == status.value
    assert parsed.usage is not None
    assert parsed.usage.output_tokens_details.reasoning_tokens == 3


@pytest.mark.parametrize(
    ("state", "fields"),
    [
        (JobState.COMPLETED, {"completed_at": 200, "finalizing_at": 200}), (JobState.FAILED, {"failed_at": 200}),
        (JobState.EXPIRED, {"expired_at": 200, "finalizing_at": 150}), (JobState.CANCELLED, {"cancelled_at": 200}),
    ],
)  # fmt: skip
def test_the_end_stands_in_the_field_of_its_state_in_whole_seconds(state: JobState, fields: dict[str, int]) -> None:
    shown = batch_object(job(state, finished_at=200.75, expires_at=150.5, results_expire_at=300.5))

    assert (shown["object"], shown["status"]) == ("batch", state.value)
    given = {"created_at": 100, "in_progress_at": 101, "expires_at": 150}
    assert {name: shown[name] for name in TIMES if shown[name] is not None} == given | fields
    assert shown["results_expire_at"] == 300
    assert all(shown[name] is None or type(shown[name]) is int for name in TIMES)


def test_usage_counts_and_metadata_are_openais() -> None:
    shown = batch_object(job(JobState.IN_PROGRESS))

    assert shown["usage"] == {
        "input_tokens": 100,
        "input_tokens_details": {"cached_tokens": 25},
        "output_tokens": 7,
        "output_tokens_details": {"reasoning_tokens": 3},
        "total_tokens": 107,
    }
    assert shown["request_counts"] == {"total": 10, "completed": 8, "failed": 2}
    assert shown["metadata"] == {"run": "7"}
    assert shown["errors"] is None
    assert "finished_at" not in shown


def test_a_file_has_an_id_once_the_job_has_ended_and_if_it_has_lines() -> None:
    def ids(shown: dict[str, object]) -> tuple[object, object]:
        return shown["output_file_id"], shown["error_file_id"]

    assert ids(batch_object(job(JobState.IN_PROGRESS))) == (None, None)
    assert ids(batch_object(job(JobState.COMPLETED))) == ("file-s0-1-output", "file-s0-1-error")
    only_good = RequestCounts(total=10, completed=10, failed=0)
    assert ids(batch_object(job(JobState.COMPLETED, request_counts=only_good))) == ("file-s0-1-output", None)
    only_bad = RequestCounts(total=10, completed=0, failed=10)
    assert ids(batch_object(job(JobState.CANCELLED, request_counts=only_bad))) == (None, "file-s0-1-error")
    assert batch_object(job(JobState.VALIDATING))["input_file_id"] == "file-s0-1-input"


@pytest.mark.parametrize(
    ("deadline_s", "window"),
    [(86_400, "24h"), (7 * 86_400, "168h"), (5400, "90m"), (90, "90s"), (0.2, "1s"), (None, "none")],
)
def test_the_completion_window_is_the_deadline(deadline_s: float | None, window: str) -> None:
    expires_at = None if deadline_s is None else 100.25 + deadline_s
    assert batch_object(job(JobState.IN_PROGRESS, expires_at=expires_at))["completion_window"] == window


def test_the_errors_of_a_failed_job_are_its_bad_lines() -> None:
    errors = (
        BatchError(code="invalid_json_line", message="not JSON", line=3),
        BatchError(code="empty_file", message="the job has no lines"),
    )

    assert batch_object(job(JobState.FAILED, errors=errors, finished_at=1.0))["errors"] == {
        "object": "list",
        "data": [
            {"code": "invalid_json_line", "message": "not JSON", "param": None, "line": 3},
            {"code": "empty_file", "message": "the job has no lines", "param": None, "line": None},
        ],
    }


def test_only_answers_go_to_the_output_file() -> None:
    refused = line_error_record(LineError("bad", code="invalid_json_line", index=0), CONTEXT)
    unfinished = [unfinished_record(reason, 0, "a", CONTEXT) for reason in Unfinished]
    answered = {"custom_id": "a", "response": {"status_code": 200, "body": {}}, "error": None}

    assert BatchFile.of_record(answered) is BatchFile.OUTPUT
    assert {BatchFile.of_record(record) for record in (refused, *unfinished)} == {BatchFile.ERROR}


def test_a_files_id_names_its_job() -> None:
    assert [file.id_of("s0-1") for file in BatchFile] == ["file-s0-1-input", "file-s0-1-output", "file-s0-1-error"]
