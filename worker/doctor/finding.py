"""One thing `millrace doctor` looked at."""

from __future__ import annotations

from dataclasses import dataclass

from worker.doctor.level import Level


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    check: str
    level: Level
    detail: str
    fix: str | None = None  # None where there is nothing to mend
