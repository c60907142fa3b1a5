"""One line where lines belong."""

from __future__ import annotations

from collections.abc import Mapping


def refuse_single_line(lines: object) -> None:
    """Raise TypeError for what can be iterated but is one line: its characters or keys are no requests."""
    if isinstance(lines, (str, bytes, bytearray, memoryview, Mapping)):
        raise TypeError(
            f"lines is one {type(lines).__name__}; accepted: an iterable of lines (bytes, str or mappings), "
            "such as [line] or an open file"
        )
