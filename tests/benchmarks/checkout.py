"""Which version of the source a benchmark measured."""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]


@dataclass(frozen=True)
class Checkout:
    """The commit, and whether the source is that commit's."""

    commit: str  # "unknown" outside a git checkout
    dirty: bool | None  # whether tracked files differ from the commit; None where that is unknown

    @classmethod
    def read(cls) -> Checkout:
        """The one this file is in."""
        changed = command_output(["git", "status", "--porcelain", "--untracked-files=no"])
        commit = command_output(["git", "rev-parse", "HEAD"])
        return cls(commit or "unknown", None if changed is None else bool(changed))

    def __str__(self) -> str:
        return f"commit {self.commit}{', with changes' if self.dirty else ''}"


def command_output(command: Sequence[str]) -> str | None:
    """What the command prints when run in the checkout, None where it fails or is not there."""
    try:
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True, timeout=30)
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
