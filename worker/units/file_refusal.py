"""Why a strict job's file is refused."""

from __future__ import annotations

from worker.lines.line_error import LineError
from worker.schemas.batch_error import BatchError

MAX_ERRORS = 100  # kept: enough to see what is wrong with a file, and they travel with every status of the job
MAX_MESSAGE_CHARS = 400
MAX_PARAM_CHARS = 200  # a key of the line, which may be as long as that

# What a file is refused for, by the code of the line; what is not here is an invalid_request.
_CODES = {code: code for code in (
    "invalid_json_line", "duplicate_custom_id", "url_mismatch", "model_mismatch", "model_not_found"
)} | {"unknown_url": "url_mismatch"}  # fmt: skip


class FileRefusal:
    """Collects a file's bad lines, in bounded memory."""

    def __init__(self, num_lines: int) -> None:
        self._num_lines = num_lines
        self._num_bad = 0
        self._errors: list[BatchError] = []

    def __bool__(self) -> bool:
        """Whether there is a bad line."""
        return self._num_bad > 0

    @property
    def errors(self) -> tuple[BatchError, ...]:
        """The first bad lines."""
        return tuple(self._errors)

    @property
    def reason(self) -> str:
        """The refusal in a sentence."""
        first = self._errors[0]
        return f"{self._num_bad} of the file's {self._num_lines} lines are bad; line {first.line}: {first.message}"

    @property
    def for_log(self) -> str:
        """The refusal without a word of the file: a message quotes values, and a param may be a key of the line."""
        first = self._errors[0]
        return f"{self._num_bad} of {self._num_lines} lines are bad; line {first.line}: {first.code}"

    def add(self, error: LineError) -> None:
        """Count a bad line."""
        self._num_bad += 1
        if len(self._errors) < MAX_ERRORS:
            code = _CODES.get(error.code, "invalid_request")
            message = error.message[:MAX_MESSAGE_CHARS]
            param = None if error.param is None else error.param[:MAX_PARAM_CHARS]
            self._errors.append(BatchError(code=code, message=message, line=error.index + 1, param=param))
