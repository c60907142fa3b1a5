"""Reading what Redis answers. The client does not decode: request lines may be any bytes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from worker.broker.untyped import Untyped

# A script's reply is whatever the script returns; only its reader here knows the shape.
RedisReply = Untyped


def text(value: bytes | str) -> str:
    """A word of ours (state, token, id) from a reply."""
    return value.decode() if isinstance(value, bytes) else value


def text_fields(fields: Mapping[Untyped, Untyped]) -> dict[str, str]:
    """A hash whose values are all text of ours."""
    return {text(name): text(value) for name, value in fields.items()}


def raw_values(values: Iterable[bytes | str | None]) -> list[bytes | None]:
    """Values as they were stored."""
    return [value.encode() if isinstance(value, str) else value for value in values]
