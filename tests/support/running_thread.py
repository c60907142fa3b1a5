"""A loop of the worker on a thread of its own, for one test."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from worker.runtime.supervision import SupervisedThread


@contextmanager
def running_thread(run: Callable[[threading.Event], None]) -> Iterator[SupervisedThread]:
    """Run `run` until the end of the block; it must end within five seconds then, and never raise."""
    failures: list[BaseException] = []
    thread = SupervisedThread("test", run, on_failure=failures.append)
    thread.start()
    try:
        yield thread
    finally:
        assert thread.stop(5)
        assert failures == []
