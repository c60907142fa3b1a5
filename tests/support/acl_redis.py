"""A private Redis whose users are those that `millrace acl` prints."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import redis

from tests.support.redis_server import START_TIMEOUT_S, redis_executable
from worker.acl import ADMIN, FLOWER, PRODUCER, WORKER, acl_file

_PASSWORDS = {
    PRODUCER: "a-producer's p@ss/word",
    WORKER: "a-worker's p@ss/word #2",
    FLOWER: "flower's p@ss/word #4",
    ADMIN: "an-admin's p@ss/word :3",
}


@dataclass(frozen=True)
class AclRedis:
    """A server, and a client that may do everything."""

    port: int
    admin: redis.Redis

    @property
    def producer_url(self) -> str:
        return self.url(PRODUCER.name, "a-producer's%20p%40ss%2Fword")

    @property
    def worker_url(self) -> str:
        return self.url(WORKER.name, "a-worker's%20p%40ss%2Fword%20%232")

    @property
    def flower_url(self) -> str:
        return self.url(FLOWER.name, "flower's%20p%40ss%2Fword%20%234")

    def url(self, user: str, quoted_password: str) -> str:
        return f"redis://{user}:{quoted_password}@127.0.0.1:{self.port}/0"

    def denials(self) -> list[str]:
        """What somebody wanted and was not allowed, since the log was last cleared."""
        return [
            f"{entry['username']} may not {entry['context']} {entry['reason']} {entry['object']} (x{entry['count']})"
            for entry in self.admin.acl_log()
        ]


@contextmanager
def acl_redis(directory: Path, *, port: int) -> Iterator[AclRedis]:
    """Run a server on `port` with a producer, a worker and an admin, and no default user."""
    executable = redis_executable()
    file = directory / "users.acl"
    version = _version(executable)
    file.write_text(acl_file(_PASSWORDS, version))
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "aclfile": file}
    if version >= (7, 0):  # off by default since then: it must be the user that is refused, not the command
        options |= {"enable-module-command": "local", "enable-debug-command": "local"}
    arguments = [word for name, value in options.items() for word in (f"--{name}", str(value))]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen([executable, *arguments], stdout=log, stderr=subprocess.STDOUT)
    admin = redis.Redis(port=port, username=ADMIN.name, password=_PASSWORDS[ADMIN], decode_responses=True)
    try:
        _wait_until_it_answers(admin, process)
        yield AclRedis(port, admin)
    finally:
        admin.close()
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def _version(executable: str) -> tuple[int, int]:
    text = subprocess.run([executable, "--version"], capture_output=True, check=True, text=True).stdout
    major, minor = text.partition("v=")[2].split(".")[:2]
    return int(major), int(minor)


def _wait_until_it_answers(admin: redis.Redis, process: subprocess.Popen[bytes]) -> None:
    until_s = time.monotonic() + START_TIMEOUT_S
    while True:
        try:
            admin.ping()
        except redis.RedisError:
            if process.poll() is not None or time.monotonic() > until_s:
                raise
            time.sleep(0.05)
        else:
            return
