"""Builds the record of a request without an answer: it failed, was cancelled, or came too late."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Self

from worker.lines.bodies import EmbeddingBody
from worker.lines.errors import LineError
from worker.lines.request_line import RequestLine
from worker.lines.responses import ResponsesChat
from worker.lines.scoring import ClassifyBody, PairBody
from worker.records.record import RecordContext


@dataclass(frozen=True, slots=True)
class Failure:
    """What the `error` object of a failed request says."""

    status_code: int  # 400: the request's own fault; 500: the engine's; 503: the engine's, and it may pass
    type: str
    message: str
    code: str
    param: str | None = None  # path inside the request's body

    @classmethod
    def of_request(cls, message: str, *, code: str, param: str | None) -> Self:
        """The request's own fault."""
        return cls(400, "invalid_request_error", message, code, param)

    @classmethod
    def of_server(cls, message: str, *, code: str = "internal_error", may_pass: bool = False) -> Self:
        """The engine's fault."""
        return cls(503 if may_pass else 500, "server_error", message, code)

    def renamed(self, name_of: Callable[[str], str]) -> Self:
        """The same with another name for the parameter, with which its message begins."""
        param = None if self.param is None else name_of(self.param)
        return replace(self, message=name_of(self.message), param=param)


# Parameters that make a record large, the worst first.
_ENLARGING = ("logprobs", "top_logprobs", "echo", "return_token_ids", "n", "max_completion_tokens", "max_tokens")


def too_large_record(line: RequestLine, num_bytes: int, limit: int, context: RecordContext) -> dict[str, object]:
    """The result line in place of one of `num_bytes`, above limits.max_record_bytes: it says what to ask less of."""
    if isinstance(line.body, EmbeddingBody):
        param, less = "input", "fewer inputs in a line"
        if line.body.encoding_format == "float":
            less += ", or encoding_format base64, which takes half"
    elif isinstance(line.body, PairBody | ClassifyBody):
        param = "input" if isinstance(line.body, ClassifyBody) else line.body.sides[1][0]
        less = "fewer texts in a line"
    else:
        asked = [name for name in _ENLARGING if getattr(line.body, name, None) not in (None, False, 0, 1)]
        asked = asked or ["max_tokens"]
        if isinstance(line.body, ResponsesChat):
            asked = ["max_output_tokens"]
        param, less = asked[0], "less by " + ", ".join(asked)
    failure = Failure.of_request(
        f"the record would have {num_bytes:,} bytes, limit {limit:,} (limits.max_record_bytes): ask for {less}",
        code="record_too_large",
        param=param,
    )
    return error_record(failure, line.index, line.custom_id, context)


class Unfinished(StrEnum):
    """Why a request was not carried out although nothing is wrong with it. Values are OpenAI's codes."""

    CANCELLED = "batch_cancelled"
    EXPIRED = "batch_expired"

    @property
    def message(self) -> str:
        """What the record says."""
        if self is Unfinished.CANCELLED:
            return "This request was not executed because the batch was cancelled."
        return "This request could not be executed before the completion window expired."


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
    failure = Failure.of_request(error.message, code=error.code, param=error.param)
    return error_record(failure, error.index, error.custom_id, context)


def unfinished_record(
    reason: Unfinished, index: int, custom_id: str | None, context: RecordContext
) -> dict[str, object]:
    """The result line of line `index` (0-based): no response, and OpenAI's code for the reason."""
    return {
        "id": context.record_id(index),
        "custom_id": custom_id,
        "response": None,
        "error": {"code": reason.value, "message": reason.message},
    }
