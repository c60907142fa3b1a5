"""What the server refuses, as OpenAI's error objects say it."""

from __future__ import annotations


class ApiError(Exception):
    """A request that is answered with an error."""

    kind = "invalid_request_error"

    def __init__(
        self,
        message: str,
        *,
        status: int = 400,
        param: str | None = None,
        code: str | None = None,
        retry_after_s: float | None = None,
    ) -> None:
        """`param`: the field of the request that is wrong; `retry_after_s`: when another try may succeed."""
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.retry_after_s = retry_after_s


class KeyRefused(ApiError):
    """There is no such key, or none was given."""

    kind = "authentication_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, status=401, code="invalid_api_key")


class NotAllowed(ApiError):
    """Whoever asks may not do this."""

    kind = "permission_error"

    def __init__(self, message: str) -> None:
        super().__init__(message, status=403)


class TooMuch(ApiError):
    """There is no room now; the same again may succeed later."""

    kind = "rate_limit_error"

    def __init__(self, message: str, code: str, retry_after_s: float | None) -> None:
        super().__init__(message, status=429, code=code, retry_after_s=retry_after_s)


class ServerFault(ApiError):
    """A defect of the server."""

    kind = "server_error"

    def __init__(self) -> None:
        super().__init__("the server failed, see its log", status=500)


class Unavailable(ApiError):
    """Redis cannot be had, or cannot take what was asked for."""

    kind = "server_error"

    def __init__(self, message: str, retry_after_s: float | None = None) -> None:
        super().__init__(message, status=503, code="unavailable", retry_after_s=retry_after_s)
