"""A thread that cannot end unnoticed."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable

from worker.process.stop_signal import StopSignal

logger = logging.getLogger(__name__)


class SupervisedThread:
    """Runs `run` until it is told to stop; whatever `run` raises is logged and handed to `on_failure`, once.

    `run` gets the event that tells it to stop, and is to ask it at least once a round: see StopSignal. A daemon: a
    thread that hangs must not keep the process from exiting.
    """

    def __init__(
        self, name: str, run: Callable[[threading.Event], None], *, on_failure: Callable[[BaseException], None]
    ) -> None:
        self._run = run
        self._on_failure = on_failure  # called on this thread
        self._stopping = StopSignal()
        self._thread = threading.Thread(target=self._supervise, name=name, daemon=True)

    @property
    def name(self) -> str:
        """The thread's name."""
        return self._thread.name

    @property
    def overdue_s(self) -> float:
        """How long past its time it has not come round; see StopSignal."""
        return self._stopping.overdue_s

    def start(self) -> None:
        """Begin."""
        self._thread.start()

    def stop(self, timeout_s: float) -> bool:
        """Tell it to stop and wait for its end; False if that takes longer."""
        self._stopping.set()
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _supervise(self) -> None:
        try:
            self._run(self._stopping)
        except Exception as error:  # a seam: a worker without this thread looks healthy and is not
            logger.exception("the thread %s broke", self._thread.name)
            self._on_failure(error)
