"""A request line that cannot be run."""

from __future__ import annotations


class LineError(Exception):
    """One line's own fault: it becomes an error record, its neighbours run.

    `code` is stable and meant for programs: invalid_json_line, line_too_long, invalid_type, invalid_value,
    missing_parameter, unknown_parameter, unsupported_parameter, unknown_url, url_mismatch, string_too_long,
    duplicate_custom_id, and of a strict file model_mismatch, model_not_found.
    """

    def __init__(
        self, message: str, *, code: str, index: int, param: str | None = None, custom_id: str | None = None
    ) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.index = index  # 0-based, blank lines not counted; `line` in records is index + 1
        self.param = param  # path inside the body, `messages[0].content`, or a field of the line
        self.custom_id = custom_id  # None when the line is too broken to have one
