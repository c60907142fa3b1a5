"""A span as a collector got it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True)
class CollectedSpan:
    """A span as a collector got it; ids in hexadecimal, times in nanoseconds since 1970."""

    name: str
    trace_id: str
    span_id: str
    parent_id: str  # "" of a root
    began_ns: int
    ended_ns: int
    attributes: dict[str, Any]
    service: str
    is_error: bool
