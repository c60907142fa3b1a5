"""How much of an answer was thinking."""

from __future__ import annotations

from collections.abc import Mapping

_PATH = ("response", "body", "usage", "completion_tokens_details", "reasoning_tokens")


def reasoning_tokens(record: Mapping[str, object]) -> int:
    """What the record's `usage` says; 0 where it says nothing."""
    value: object = record
    for key in _PATH:
        if not isinstance(value, Mapping):
            return 0
        value = value.get(key)
    return value if isinstance(value, int) else 0
