"""Worker processes under a supervisor."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

from tests.chaos.fleet_worker import FleetWorker
from tests.chaos.worker_options import WorkerOptions
from tests.support.wait_until import wait_until
from tests.support.worker_processes import QUICK
from worker.client import BatchClient

SUPERVISION_S = 0.05
STOP_TIMEOUT_S = 40.0


class Fleet:
    """Starts workers, and starts one again whose process ended, as systemd or compose would, until told to stop."""

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
        **settings: str,
    ) -> FleetWorker:
        """Start a worker; settings as `worker__lease_s="2"`. It is not yet up when this returns.

        Dying at a point is for its first life.
        """
        values = {**self._settings, **{name.replace("__", "."): value for name, value in settings.items()}}
        options = replace(
            self._options, die_at=die_at, clock_shift_s=clock_shift_s, has_other_scripts=has_other_scripts
        )
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
    """A fleet, empty at first, of which nothing outlives the block. Workers have a fake engine unless told."""
    fleet = Fleet(redis_url, directory, options or WorkerOptions(engine={}), settings or {})
    try:
        yield fleet
    finally:
        fleet.kill_all()
