"""Real worker processes with a fake engine, for one test."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path

from tests.support.wait_until import wait_until
from tests.support.warm_interpreter import warm_interpreter
from tests.support.warm_process import WarmProcess
from worker.client import BatchClient

STOP_TIMEOUT_S = 15.0

# Times short enough for a test.
QUICK = {
    "worker.lease_s": "1.0",
    "worker.renew_interval_s": "0.2",
    "worker.reap_interval_s": "0.2",
    "worker.reap_grace_s": "0.5",
    "worker.drain_timeout_s": "5",
    "worker.concurrency": "4",
    "worker.shard_size": "10",
}


class WorkerProcesses:
    """Starts workers and sees to it that none outlives the test."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._redis_url = redis_url
        self._directory = directory
        self._processes: list[WarmProcess] = []

    def start(self, *, engine: Mapping[str, object] | None = None, **settings: str) -> WarmProcess:
        """Start a worker; settings as `worker__lease_s="2"`, over QUICK."""
        values = {**QUICK, **{name.replace("__", "."): value for name, value in settings.items()}}
        arguments = [f"{key}={value}" for key, value in {"redis.url": self._redis_url, **values}.items()]
        program = "tests.support.worker_program"
        with self._log_path(len(self._processes)).open("wb") as log:
            process = warm_interpreter().start(program, [json.dumps(engine or {}), *arguments], log)
        self._processes.append(process)
        return process

    def wait_up(self, client: BatchClient) -> None:
        """Wait until every worker that was started has sent its heartbeat."""
        wait_until(lambda: len(client.workers()) >= len(self._processes), timeout_s=20)

    def log(self, number: int = 0) -> str:
        """What the worker wrote so far."""
        return self._log_path(number).read_text()

    def kill_all(self) -> None:
        """End what still runs."""
        for process in self._processes:
            if process.poll() is None:
                process.kill()
            process.wait(STOP_TIMEOUT_S)

    def _log_path(self, number: int) -> Path:
        return self._directory / f"worker-{number}.log"


@contextmanager
def worker_processes(redis_url: str, directory: Path) -> Iterator[WorkerProcesses]:
    """Workers of one test."""
    workers = WorkerProcesses(redis_url, directory)
    try:
        yield workers
    finally:
        workers.kill_all()
