"""One line's request."""

from __future__ import annotations

from engine.request import AnyRequest
from worker.lines.request_line import RequestLine
from worker.requests.builder import RequestBuilder


def build_request(
    builder: RequestBuilder, line: RequestLine, request_id: str = "r", *, created_s: int = 0, tenant: str = ""
) -> AnyRequest:
    """The engine's request for `line`. Raises what is wrong with it."""
    [request] = builder.build_all([(line, request_id)], created_s=created_s, tenant=tenant)
    if isinstance(request, Exception):
        raise request
    return request
