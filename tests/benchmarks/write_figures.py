"""A benchmark's figures as a file that says how they were made."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path


def write_figures(path: Path, module: str, arguments: Sequence[str] | None, figures: Mapping[str, object]) -> None:
    """Replace the file: JSON, the day (UTC) and the command before the figures.

    module: below `tests.benchmarks`; arguments: what followed it, None for those of this process.
    """
    given = sys.argv[1:] if arguments is None else arguments
    command = shlex.join(["python", "-m", f"tests.benchmarks.{module}", *given])
    about = {"date": datetime.now(UTC).date().isoformat(), "command": command}
    path.write_text(json.dumps(about | dict(figures), indent=1) + "\n")
