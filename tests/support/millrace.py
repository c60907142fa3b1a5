"""The `millrace` command as users run it: a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
_CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker.cli.main as m; m.main()"
COMMAND = [sys.executable, "-c", _CODE]


def millrace(*arguments: str | Path, stdin: bytes = b"") -> subprocess.CompletedProcess[bytes]:
    """Run `millrace ARGUMENTS` to its end."""
    return subprocess.run([*COMMAND, *map(str, arguments)], input=stdin, capture_output=True, check=False, timeout=100)
