"""A process that `warm_server` forked."""

from __future__ import annotations

import os
import select
import signal
import subprocess
import threading
import time

POLL_S = 0.002


class WarmProcess:
    """What tests use of `subprocess.Popen`; its descriptors are given, so there are no pipes."""

    def __init__(self, module: str, told: int) -> None:
        """told: a pipe to read the process id from, and then the exit code."""
        self.args = module
        self.returncode: int | None = None
        self._told = os.fdopen(told, "rb", buffering=0)
        self._lock = threading.Lock()  # of supervisors and tests that look at the same time
        self.pid = int(self._told.readline())

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        with self._lock:
            if self.returncode is None and select.select([self._told], [], [], 0)[0]:
                self.returncode = int(self._told.readline())
                self._told.close()
            return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """The exit code. Raises subprocess.TimeoutExpired."""
        until_s = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if until_s is not None and time.monotonic() > until_s:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            time.sleep(POLL_S)
        return code

    def send_signal(self, number: signal.Signals) -> None:
        """Nothing if it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """SIGKILL."""
        self.send_signal(signal.SIGKILL)
