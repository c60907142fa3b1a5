"""Says what `millrace doctor` found: what was looked at, how bad it is, and how to mend it."""

from __future__ import annotations

from collections.abc import Sequence
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

    @property
    def text(self) -> str:
        """A line, and one more for the fix if there is any."""
        fix = "" if self.fix is None else f"\n{'':8} fix: {self.fix}"
        return f"{self.level.value:8} {self.check}: {self.detail}{fix}"


def summary(findings: Sequence[Finding]) -> str:
    """One line: how many there are of each level, and what the warnings and failures are about."""
    checks = {level: [finding.check for finding in findings if finding.level is level] for level in Level}
    parts = [f"{len(named)} {level.value}{_names(level, named)}" for level, named in checks.items()]
    return ", ".join(parts)


def _names(level: Level, checks: Sequence[str]) -> str:
    return f" ({', '.join(dict.fromkeys(checks))})" if checks and level is not Level.OK else ""
