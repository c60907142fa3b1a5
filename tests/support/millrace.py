"""The `millrace` command as users run it: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker.cli.main as m; m.main()"
COMMAND = [sys.executable, "-c", _CODE]


def millrace(
    *arguments: str | Path, stdin: bytes = b"", timeout_s: float = 100.0
) -> subprocess.CompletedProcess[bytes]:
    """Run `millrace ARGUMENTS` to its end."""
    command = [*COMMAND, *map(str, arguments)]
    return subprocess.run(command, input=stdin, capture_output=True, check=False, timeout=timeout_s)
