"""How bad a finding is."""

from __future__ import annotations

from enum import StrEnum


class Level(StrEnum):
    """How bad a finding is."""

    OK = "ok"
    WARNING = "warning"  # works, but not as well or as safely as it could
    FAILED = "failed"  # something will not work
