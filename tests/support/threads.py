"""Checks that threads end with what started them, and tells whether a thread waits."""

from __future__ import annotations

import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

THREADS_END_S = 10.0  # for threads that were told to end

# Beginnings of names. These threads live as long as the process, by design of the library that starts them.
PROCESS_WIDE = ("tqdm_monitor",)  # tqdm's, of the first progress bar that transformers draws: it refreshes slow bars
# An engine's compiler starts its thread with its first grammar and ends it when it is closed. Where the engine is a
# module's fixture, that is during one test and after the last: the thread must end with the module.
STARTED_LATE = ("grammars_",)


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
