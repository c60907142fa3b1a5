"""A library that says the same again and again."""

from __future__ import annotations

import logging
import time

INTERVAL_S = 60.0


class PacedFilter(logging.Filter):
    """Lets one record a minute through of each logger below `prefix`, and everything of others.

    OpenTelemetry says several times for each batch of spans that the collector is away: a line a second for as long as
    that takes.
    """

    def __init__(self, prefix: str) -> None:
        super().__init__()
        self._prefix = f"{prefix}."
        self._silent_until_s: dict[str, float] = {}  # by logger

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether the record is to be logged."""
        if not record.name.startswith(self._prefix):
            return True
        now_s = time.monotonic()
        if now_s < self._silent_until_s.get(record.name, 0.0):
            return False
        self._silent_until_s[record.name] = now_s + INTERVAL_S
        return True
