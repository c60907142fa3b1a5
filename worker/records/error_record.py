"""The record of a request that failed: an OpenAI Batch result line with an `error` body."""

from __future__ import annotations

from worker.lines.line_error import LineError
from worker.records.failure import Failure
from worker.records.record_context import RecordContext


def error_record(failure: Failure, index: int, custom_id: str | None, context: RecordContext) -> dict[str, object]:
    """The result line of line `index` (0-based).

    `error.line` is the number of the request in its job: from 1, blank lines not counted. Our clients send none to
    Redis; a line of white space that a plain Celery producer stages is counted, and ends as an error record.
    """
    error = {
        "message": failure.message,
        "type": failure.type,
        "param": failure.param,
        "code": failure.code,
        "line": index + 1,
    }
    return context.answered(index, custom_id, failure.status_code, {"error": error})


def line_error_record(error: LineError, context: RecordContext) -> dict[str, object]:
    """The result line of a line that could not be read as a request."""
    return error_record(Failure.of_line(error), error.index, error.custom_id, context)
