"""Keeping other people's words off stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Whatever is written to standard output meanwhile goes to standard error: stdout is for data.

    By descriptor, not by `sys.stdout`: Celery says `worker: Warm shutdown (MainProcess)` with os.write from a signal
    handler, and a library in C knows no other way.
    """
    if sys.__stdout__ is None or sys.__stderr__ is None:  # started without one of them: nothing can be said there
        yield
        return
    stdout, stderr = sys.__stdout__.fileno(), sys.__stderr__.fileno()
    sys.__stdout__.flush()
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        yield
    finally:
        sys.__stdout__.flush()
        os.dup2(kept, stdout)
        os.close(kept)
