"""The keys that one query sees in one row."""

from __future__ import annotations

from typing import NamedTuple


class KeyRange(NamedTuple):
    """Tokens start .. end - 1 of a row, seen by one query."""

    row: int
    query: int  # index into q
    start: int  # a multiple of block_size
    end: int
