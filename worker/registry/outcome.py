"""How a prompt ended."""

from __future__ import annotations

from enum import StrEnum


class Outcome(StrEnum):
    """How a prompt ended, as the counters have it. Values are those of put.lua."""

    OK = "ok"
    ERROR = "error"
    CANCELLED = "cancelled"
    EXPIRED = "expired"
    LOST = "lost"
