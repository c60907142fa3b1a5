"""The `millrace` command as users run it: a process of its own."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryFile
from typing import IO

from tests.support.warm_interpreter import warm_interpreter

ROOT = Path(__file__).resolve().parents[2]
_CODE = f"import sys; sys.path.insert(0, {str(ROOT)!r}); import worker.cli.main as m; m.main()"
COMMAND = [sys.executable, "-c", _CODE]  # with all of its imports
CLI = "worker.cli.main"  # for `warm_interpreter`
PIPE_BYTES = 65_536  # what a pipe takes at once


def millrace(
    *arguments: str | Path, stdin: bytes = b"", timeout_s: float = 100.0
) -> subprocess.CompletedProcess[bytes]:
    """Run `millrace ARGUMENTS` to its end in a warm process; `stdin` comes by a pipe, PIPE_BYTES at most."""
    assert len(stdin) <= PIPE_BYTES
    read, write = os.pipe()
    os.write(write, stdin)
    os.close(write)
    with TemporaryFile() as stdout, TemporaryFile() as stderr:
        process = warm_interpreter().start(CLI, list(map(str, arguments)), stdout, stderr=stderr, stdin=read)
        os.close(read)
        try:
            code = process.wait(timeout_s)
        finally:
            process.kill()
        return subprocess.CompletedProcess(arguments, code, *(_content(stream) for stream in (stdout, stderr)))


def _content(stream: IO[bytes]) -> bytes:
    stream.seek(0)
    return stream.read()
