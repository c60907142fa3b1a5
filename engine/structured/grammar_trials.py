"""Grammars are compiled in a process of their own before they are compiled here."""

from __future__ import annotations

import json
import math
import os
import select
import subprocess
import sys
import threading
import time
import weakref

from engine.errors import EngineUnavailable
from engine.structured.grammar import Grammar

READ_BYTES = 1 << 16
START_TIMEOUT_S = 60.0  # it imports little; on a machine that is busy this takes seconds
CHILD = (
    "import sys; sys.path[:] = sys.argv[3:]; "
    "from engine.structured.trial_main import main; main(max_bytes=int(sys.argv[1]), timeout_s=int(sys.argv[2]))"
)


class GrammarTrials:
    """Tries grammars in a child process, which a bad one may hang, exhaust or kill. One caller at a time; `close` may
    come from another thread.

    The child is started with the first grammar (0.17 s) and again after one that it did not survive.
    """

    def __init__(self, *, timeout_s: float, max_bytes: int) -> None:
        self._timeout_s = timeout_s
        self._max_bytes = max_bytes  # of address space the child may have
        self._child: subprocess.Popen[bytes] | None = None
        self._in_use = threading.Lock()  # held while the child's pipes are: nobody else may close them then
        self._is_closed = False

    def definition(self, grammar: Grammar) -> str:
        """The definition of a grammar that compiles. Raises ValueError saying what is wrong with another, and
        TimeoutError, MemoryError where trying it took too long or the child's life; EngineUnavailable where it could
        not be tried, or not to the end, for no fault of its own.
        """
        request = json.dumps((grammar.kind, grammar.text)).encode() + b"\n"
        try:
            with self._in_use:
                defined, fault = json.loads(self._ask(request))
        except TimeoutError as error:
            raise TimeoutError(f"not compiled within {self._timeout_s:g} s") from error
        except (OSError, ValueError) as error:
            if isinstance(error, BrokenPipeError) and not self._is_closed:
                raise MemoryError(f"not compiled within {self._max_bytes} bytes and the depth of a stack") from error
            raise EngineUnavailable(f"the process that tries grammars cannot be asked: {error}") from error
        if fault:
            raise ValueError(fault)
        return str(defined)

    def close(self) -> None:
        """End the child, if there is one, for good: a grammar that is being tried, or comes later, is not tried."""
        self._is_closed = True
        if (child := self._child) is not None:
            child.kill()  # whoever waits for its answer stops waiting
        with self._in_use:
            self._drop_child()

    def _drop_child(self) -> None:
        if self._child is not None:
            self._end_child()
            self._child = None

    def _ask(self, request: bytes) -> bytes:
        """The child's answer. One that waited may have died of something else: its death counts from a new child."""
        if self._child is not None:
            try:
                return self._exchange(self._child, request, self._timeout_s)
            except BrokenPipeError:
                if self._is_closed:
                    raise
        return self._exchange(self._start(), request, self._timeout_s)

    def _start(self) -> subprocess.Popen[bytes]:
        path = [entry or os.getcwd() for entry in sys.path]  # it imports what this process would, and from nowhere else
        limits = (str(self._max_bytes), str(math.ceil(self._timeout_s)))
        try:
            child = subprocess.Popen(
                [sys.executable, "-I", "-c", CHILD, *limits, *path],
                bufsize=0,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                start_new_session=True,  # an interrupt from the terminal is not for it; it ends when its stdin does
            )
            self._child, self._end_child = child, weakref.finalize(self, _end, child)
            if self._is_closed:  # `close` may not have seen this child
                child.kill()
            self._exchange(child, b"", START_TIMEOUT_S)
        except OSError as error:
            raise EngineUnavailable(f"the process that tries grammars did not start: {error}") from error
        return child

    def _exchange(self, child: subprocess.Popen[bytes], request: bytes, timeout_s: float) -> bytes:
        """Send a line, read a line. Raises TimeoutError, BrokenPipeError where the child died; it is gone then."""
        try:
            return _exchanged(child, request, time.monotonic() + timeout_s)
        except (OSError, ValueError):
            self._drop_child()
            raise


def _exchanged(child: subprocess.Popen[bytes], request: bytes, deadline_s: float) -> bytes:
    if child.stdin is None or child.stdout is None:
        raise BrokenPipeError("no pipes")
    child.stdin.write(request)  # the child waits for it: this does not block
    poll = select.poll()  # select.select takes no descriptor above 1023
    poll.register(child.stdout, select.POLLIN)
    answer = b""
    while not answer.endswith(b"\n"):
        left_s = deadline_s - time.monotonic()
        if left_s <= 0 or not poll.poll(left_s * 1000):
            raise TimeoutError
        part = os.read(child.stdout.fileno(), READ_BYTES)
        if not part:
            raise BrokenPipeError("the child died")
        answer += part
    return answer


def _end(child: subprocess.Popen[bytes]) -> None:
    child.kill()
    with child:  # closes its pipes and waits
        pass
