"""A value, short enough to quote in an error message."""

from __future__ import annotations

import json

MAX_QUOTED_CHARS = 80


def shorten(value: object) -> str:
    """`value` as ASCII JSON, cut to 80 characters: an error record must not carry a whole prompt."""
    if isinstance(value, str):
        value = value[: MAX_QUOTED_CHARS + 1]
    elif isinstance(value, list | tuple):
        value = list(value[:MAX_QUOTED_CHARS])
    elif isinstance(value, int) and abs(value) >= 10**MAX_QUOTED_CHARS:
        return f"a whole number of {value.bit_length()} bits"
    text = json.dumps(value, default=repr)
    return text if len(text) <= MAX_QUOTED_CHARS else text[: MAX_QUOTED_CHARS - 3] + "..."
