"""Why a request has no answer."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

from worker.lines.line_error import LineError


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
    def of_line(cls, error: LineError) -> Self:
        """The line could not be read as a request."""
        return cls.of_request(error.message, code=error.code, param=error.param)

    @classmethod
    def of_server(cls, message: str, *, code: str = "internal_error", may_pass: bool = False) -> Self:
        """The engine's fault."""
        return cls(503 if may_pass else 500, "server_error", message, code)
