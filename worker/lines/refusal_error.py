"""Why a line is refused, before the line's number and custom_id are known."""

from __future__ import annotations


class RefusalError(Exception):
    """Raised by the parts of the line parser; `parse_request_line` turns it into a LineError."""

    def __init__(self, message: str, *, code: str, param: str | None = None) -> None:
        super().__init__(message)
        self.message = message
        self.code = code
        self.param = param
