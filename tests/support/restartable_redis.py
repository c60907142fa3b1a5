"""A Redis of a test's own that can be stopped, killed and started again on the same port."""

from __future__ import annotations

import resource
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from tests.support.free_port import free_port
from tests.support.redis_server import START_TIMEOUT_S, redis_executable, wait_until_it_answers


class RestartableRedis:
    """With `is_durable`, the append-only file of compose.yaml; without, a restart forgets everything."""

    def __init__(self, directory: Path, *, is_durable: bool) -> None:
        self.port = free_port()
        self.url = f"redis://127.0.0.1:{self.port}/0"
        self._directory = directory
        self._is_durable = is_durable
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start the server and wait until it has read its file and answers."""
        options = {"port": self.port, "bind": "127.0.0.1", "dir": self._directory, "save": ""}
        options |= {"appendonly": "yes" if self._is_durable else "no", "appendfsync": "everysec"}
        arguments = [redis_executable()]
        for name, value in {**options, "maxmemory-policy": "noeviction"}.items():
            arguments += [f"--{name}", str(value)]
        with (self._directory / "redis.log").open("ab") as log:
            # SIGXFSZ stays ignored, as it is in Python: a file that may not grow is an error of write(), not the end.
            self._process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT, restore_signals=False)
        wait_until_it_answers(self.port, self._process)

    def stop(self) -> None:
        """End it as an administrator would: it writes its file first."""
        if self._process is not None:
            self._process.terminate()
            self._process.wait(START_TIMEOUT_S)

    def kill(self) -> None:
        """End it as the kernel would when memory runs out."""
        if self._process is not None:
            self._process.kill()
            self._process.wait(START_TIMEOUT_S)

    @contextmanager
    def no_larger_files(self) -> Iterator[None]:
        """No file of the server's may grow past its present size: its writes fail as on a full disk."""
        if self._process is None:
            raise RuntimeError("the server does not run")
        present = max(path.stat().st_size for path in self._directory.glob("*.aof"))
        before = resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE)
        resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, (present, before[1]))
        try:
            yield
        finally:
            resource.prlimit(self._process.pid, resource.RLIMIT_FSIZE, before)


@contextmanager
def restartable_redis(directory: Path, *, is_durable: bool) -> Iterator[RestartableRedis]:
    """A running server that ends with the block."""
    server = RestartableRedis(directory, is_durable=is_durable)
    server.start()
    try:
        yield server
    finally:
        server.kill()
