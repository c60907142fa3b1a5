"""Starting processes that need not import anything first."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

from tests.support.warm_process import WarmProcess

ROOT = Path(__file__).resolve().parents[2]  # so that `tests` can be imported


class WarmInterpreter:
    """One `warm_server`, which ends with this process."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.warm_server", str(theirs.fileno())]
            # Nobody waits for it: without the socket's other end it has nothing to do and goes.
            self._process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        stdout: IO[bytes],
        *,
        stderr: IO[bytes] | None = None,
        stdin: int | None = None,
    ) -> WarmProcess:
        """Run `main` of a module with this process's directory and environment, as `python -m` would.

        stderr: none to have it in stdout. stdin: a descriptor; none to have it empty.
        """
        request = {"module": module, "arguments": list(arguments), "cwd": os.getcwd(), "environ": dict(os.environ)}
        told, tells = os.pipe()
        empty = os.open(os.devnull, os.O_RDONLY)
        descriptors = [empty if stdin is None else stdin, stdout.fileno(), (stderr or stdout).fileno(), tells]
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        finally:
            os.close(tells)
            os.close(empty)
        return WarmProcess(module, told)


@cache
def warm_interpreter() -> WarmInterpreter:
    """The one of this process; the first who asks waits for its imports."""
    return WarmInterpreter()
