"""Request lines for tests."""

from __future__ import annotations

import json

from settings import LimitSettings
from worker.lines.bodies import EmbeddingBody
from worker.lines.errors import LineError
from worker.lines.parse import parse_request_line
from worker.lines.request_line import GeneratingBody, RequestLine

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


def raw_line(value: object) -> bytes:
    """`value` as the bytes of a line; NaN and lone surrogates pass, as they do from careless producers."""
    return json.dumps(value).encode("utf-8")


def batch_line(url: str, body: object, **envelope: object) -> bytes:
    """An OpenAI Batch line; `envelope` replaces or adds fields beside `body`."""
    return raw_line({"custom_id": "a", "method": "POST", "url": url, "body": body, **envelope})


def completion_line(**parameters: object) -> bytes:
    """A shorthand completion line."""
    return raw_line({"prompt": "hello", **parameters})


def chat_line(**parameters: object) -> bytes:
    """A shorthand chat line."""
    return raw_line({"messages": [{"role": "user", "content": "hello"}], **parameters})


def parse(raw: bytes, index: int = 0) -> RequestLine:
    """The line as parsed under the default limits."""
    return parse_request_line(raw, index, LimitSettings())


def body_of(raw: bytes) -> GeneratingBody:
    """The body of a line that generates."""
    body = parse(raw).body
    assert not isinstance(body, EmbeddingBody)
    return body


def error_of(raw: bytes, index: int = 0) -> LineError:
    """The error of a line that must be refused."""
    try:
        line = parse(raw, index)
    except LineError as error:
        return error
    raise AssertionError(f"accepted: {line}")
