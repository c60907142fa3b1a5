"""Defines one finding of `millrace doctor`: what was looked at, how bad it is, and how to mend it."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

# Not by name from the package index: what is called millrace there is not this project.
INSTALL_ENGINE = 'pip install -e ".[engine]" in the checkout'


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # works, but not as well or as safely as it could
    FAILED = "failed"  # something will not work


@dataclass(frozen=True, slots=True)
class Finding:
    """What was looked at, what was found, and what to do about it."""

    check: str
    level: Level
    detail: str
    fix: str | None = None  # None where there is nothing to mend
