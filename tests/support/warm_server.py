"""A process that has imported everything already, and forks: `python -m tests.support.warm_server SOCKET_DESCRIPTOR`

Importing torch and Celery takes a process 1 to 4 seconds, which is most of what a test of the command line or of a
worker takes. A fork of this one is a process like any other: it has its own memory, signals, descriptors, directory,
environment and exit code, and runs `main` of the module it is told. Not for tests of what is imported, or when.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import signal
import socket
import sys
import threading
import traceback
from typing import Any, NoReturn

PRELOADED = (
    "celery.apps.worker",
    "celery.concurrency.thread",
    "engine.loading.load",
    "kombu.transport.redis",
    "tests.support.worker_program",
    "worker.cli.admin",
    "worker.cli.main",
    "worker.cli.run",
    "worker.cli.submit",
    "worker.cli.worker",
)
MAX_REQUEST_BYTES = 1 << 20


def main() -> None:
    """Serve until the other end of the socket is closed; in a fork, run what was asked for."""
    control = socket.socket(fileno=int(sys.argv[1]))
    for name in PRELOADED:
        importlib.import_module(name)
    gc.freeze()  # what was imported is not to be gone through, and so copied, by every fork
    request = _serve(control)
    if request is not None:
        control.close()
        _end(_run(request))


def _run(request: dict[str, Any]) -> int:
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


def _end(code: int) -> NoReturn:
    """As the interpreter ends, but for taking apart every module: with torch that is a second of processor time."""
    threading._shutdown()  # type: ignore[attr-defined]  # waits for threads; not public
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def _serve(control: socket.socket) -> dict[str, Any] | None:
    """Fork for each request; returns it in the process that is to run it, None when there will be no more."""
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # nobody waits for the keepers
    while True:
        data, descriptors, _, _ = socket.recv_fds(control, MAX_REQUEST_BYTES, 4)
        if not data:
            return None
        if os.fork() == 0:
            _keep(descriptors)
            request: dict[str, Any] = json.loads(data)
            return request
        for descriptor in descriptors:
            os.close(descriptor)


def _keep(descriptors: list[int]) -> None:
    """Fork once more: whoever asked has no child to wait for, so its parent tells the process id and how it ended.

    Returns in the child. descriptors: its standard input, output and error, and where that is told.
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
    main()
