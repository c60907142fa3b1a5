"""One worker of a fleet, through all its lives."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Mapping
from dataclasses import asdict, replace
from pathlib import Path

from tests.chaos.worker_options import WorkerOptions
from tests.support.millrace import ROOT
from tests.support.warm_interpreter import warm_interpreter
from tests.support.warm_process import WarmProcess

PROGRAM = "tests.chaos.worker_program"


class FleetWorker:
    """A process that can be hurt. Thread-safe: the supervisor looks at it while a test does."""

    def __init__(self, options: WorkerOptions, settings: Mapping[str, str], log: Path, *, is_supervised: bool) -> None:
        self.exit_codes: list[int] = []  # of the lives that the supervisor saw end
        self.is_supervised = is_supervised
        self._log = log
        self._settings = [f"{key}={value}" for key, value in settings.items()]
        self._later_options = replace(options, die_at="")
        self._lock = threading.Lock()
        self._process = self._begin(options)
        self.num_lives = 1

    @property
    def is_running(self) -> bool:
        """Whether its present life goes on."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """What it wrote, in all its lives."""
        return self._log.read_text()

    @property
    def log_of_life(self) -> str:
        """What it wrote in its present life."""
        with self._log.open("rb") as log:
            log.seek(self._life_begins_at)
            return log.read().decode()

    @property
    def is_up(self) -> bool:
        """Whether it has come to take work; a signal before that ends a process that holds nothing."""
        return self.is_running and " is up\n" in self.log_of_life

    def kill(self) -> None:
        """kill -9; also what the kernel does when memory runs out."""
        self._send(signal.SIGKILL)

    def terminate(self) -> None:
        """SIGTERM: drain."""
        self._send(signal.SIGTERM)

    def quit(self) -> None:
        """SIGQUIT: give everything back at once."""
        self._send(signal.SIGQUIT)

    def freeze(self) -> None:
        """SIGSTOP: as a laptop's lid, or a machine that swaps."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def wait(self, timeout_s: float) -> int:
        """The exit code of this life."""
        return self._process.wait(timeout_s)

    def restart_if_ended(self) -> None:
        """What a supervisor does."""
        with self._lock:
            code = self._process.poll()
            if self.is_supervised and code is not None:
                self.exit_codes.append(code)
                self._process = self._begin(self._later_options)
                self.num_lives += 1

    def _begin(self, options: WorkerOptions) -> subprocess.Popen[bytes] | WarmProcess:
        arguments = [json.dumps(asdict(options)), *self._settings]
        with self._log.open("ab") as log:
            self._life_begins_at = log.tell()
            if not options.clock_shift_s:
                return warm_interpreter().start(PROGRAM, arguments, log)
            # kombu takes its own reference to time.time when it is imported.
            command = [sys.executable, "-m", PROGRAM, *arguments]
            return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT)

    def _send(self, number: signal.Signals) -> None:
        with self._lock:  # never to a process that is no more
            if self._process.poll() is None:
                self._process.send_signal(number)
