"""Worker processes whose engine answers at once."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 30.0


@contextmanager
def queue_workers(redis_url: str, directory: Path, count: int) -> Iterator[list[int]]:
    """Start workers with the tokenizer in `directory`/model and stop them at the end; their process ids."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.queue_worker",
        str(directory / "model"),
        f"redis.url={redis_url}",
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            with (directory / f"worker-{number}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        yield [process.pid for process in processes]
        for process in processes:
            process.terminate()
        codes = [process.wait(STOP_TIMEOUT_S) for process in processes]
        if any(codes):
            raise AssertionError(f"workers ended with {codes}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(STOP_TIMEOUT_S)
