"""Runs worker processes under a supervisor, which starts each again when it ends."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, replace
from pathlib import Path

from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import WarmProcess, wait_until, warm_interpreter
from tests.support.workers import QUICK, ROOT
from worker.client import BatchClient

SUPERVISION_S = 0.05
STOP_TIMEOUT_S = 40.0

PROGRAM = "tests.chaos.worker_program"


class Fleet:
    """Starts workers and, until told to stop, starts them again when they end, as systemd or compose would."""

    def __init__(self, redis_url: str, directory: Path, options: WorkerOptions, settings: Mapping[str, str]) -> None:
        self.workers: list[FleetWorker] = []
        self._directory = directory
        self._options = options
        self._settings = {"redis.url": redis_url, **QUICK, **settings}
        self._stopping = threading.Event()
        self._supervisor = threading.Thread(target=self._supervise, name="supervisor", daemon=True)
        self._supervisor.start()

    def start(
        self,
        *,
        is_supervised: bool = True,
        die_at: str = "",
        clock_shift_s: float = 0.0,
        has_other_scripts: bool = False,
        engine: Mapping[str, object] | None = None,
        **settings: str,
    ) -> FleetWorker:
        """Start a worker; settings as `worker__lease_s="2"`. It is not yet up when this returns.

        Only its first life dies at a point. engine: options of its FakeEngine over those of the fleet.
        """
        values = {**self._settings, **{name.replace("__", "."): value for name, value in settings.items()}}
        options = replace(
            self._options, die_at=die_at, clock_shift_s=clock_shift_s, has_other_scripts=has_other_scripts
        )
        if engine is not None:
            options = replace(options, engine={**(self._options.engine or {}), **engine})
        log = self._directory / f"worker-{len(self.workers)}.log"
        worker = FleetWorker(options, values, log, is_supervised=is_supervised)
        self.workers.append(worker)
        return worker

    def wait_up(self, client: BatchClient, count: int | None = None) -> None:
        """Wait until all workers, or `count`, have sent a heartbeat."""
        wanted = len(self.workers) if count is None else count
        wait_until(lambda: len(client.workers()) >= wanted, timeout_s=60)

    @property
    def num_restarts(self) -> int:
        """Lives begun by the supervisor."""
        return sum(worker.num_lives - 1 for worker in self.workers)

    def stop(self) -> list[int]:
        """End supervision, send SIGTERM to all and return the exit codes of their last lives."""
        self._end_supervision()
        for worker in self.workers:
            worker.terminate()
        return [worker.wait(STOP_TIMEOUT_S) for worker in self.workers]

    def kill_all(self) -> None:
        """End whatever still runs."""
        self._end_supervision()
        for worker in self.workers:
            worker.kill()
            worker.wait(STOP_TIMEOUT_S)

    def _end_supervision(self) -> None:
        self._stopping.set()
        self._supervisor.join()

    def _supervise(self) -> None:
        while not self._stopping.wait(SUPERVISION_S):
            for worker in list(self.workers):
                worker.restart_if_ended()


@contextmanager
def running_fleet(
    redis_url: str,
    directory: Path,
    options: WorkerOptions | None = None,
    settings: Mapping[str, str] | None = None,
) -> Iterator[Fleet]:
    """A fleet, empty at first, that ends with the block. Workers have a fake engine unless told otherwise."""
    fleet = Fleet(redis_url, directory, options or WorkerOptions(engine={}), settings or {})
    try:
        yield fleet
    finally:
        fleet.kill_all()


class FleetWorker:
    """A process that can be hurt. Thread-safe: the supervisor looks at it while a test does."""

    def __init__(self, options: WorkerOptions, settings: Mapping[str, str], log: Path, *, is_supervised: bool) -> None:
        self.exit_codes: list[int] = []  # of ended lives
        self.is_supervised = is_supervised
        self._log = log
        self._settings = [f"{key}={value}" for key, value in settings.items()]
        self._later_options = replace(options, die_at="")
        self._lock = threading.Lock()
        self._process = self._begin(options)
        self.num_lives = 1

    @property
    def is_running(self) -> bool:
        """Whether it runs now."""
        return self._process.poll() is None

    @property
    def log(self) -> str:
        """Its log, of all its lives."""
        return self._log.read_text()

    @property
    def log_of_life(self) -> str:
        """Its log, of its present life."""
        with self._log.open("rb") as log:
            log.seek(self._life_begins_at)
            return log.read().decode()

    @property
    def num_received(self) -> int:
        """Messages taken, in all its lives; Celery says so at level DEBUG."""
        return self.log.count(" received\n")

    @property
    def is_up(self) -> bool:
        """Whether it takes work; a signal before that ends a process that has none."""
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
        """SIGSTOP: like a closed laptop, or a machine that swaps."""
        self._send(signal.SIGSTOP)

    def thaw(self) -> None:
        """SIGCONT."""
        self._send(signal.SIGCONT)

    def wait(self, timeout_s: float) -> int:
        """The exit code of this life."""
        return self._process.wait(timeout_s)

    def restart_if_ended(self) -> None:
        """Start it again if it has ended, as a supervisor does."""
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
        with self._lock:  # never to an ended process
            if self._process.poll() is None:
                self._process.send_signal(number)
