"""Reading the queue's figures, now and then."""

from __future__ import annotations

import logging
import threading

import redis

from worker.registry.queue_figures import QueueFigures
from worker.registry.queue_reading import QueueReading

logger = logging.getLogger(__name__)


class QueueReader:
    """Reads the queue's figures on a thread of its own, so that nobody who asks for them waits for Redis.

    However many ask, Redis is asked once in `interval_s`.
    """

    def __init__(self, figures: QueueFigures, *, interval_s: float) -> None:
        self._figures = figures
        self._interval_s = interval_s
        self._latest: QueueReading | None = None
        self._has_answered = True  # a worker starts after Redis has answered it

    @property
    def latest(self) -> QueueReading | None:
        """What the last look found; None if it found nothing: old figures look like those of a queue that stands."""
        return self._latest

    @property
    def has_answered(self) -> bool:
        """Whether Redis answered the last look, be it with a refusal."""
        return self._has_answered

    def run(self, stopping: threading.Event) -> None:
        """Look again and again, until told to stop."""
        while not stopping.is_set():
            self._look()
            stopping.wait(self._interval_s)

    def _look(self) -> None:
        try:
            self._latest = self._figures.read()
            self._has_answered = True
        except redis.RedisError as error:
            logger.warning("the queue's figures could not be read: %s", error)
            self._latest = None
            # Such as NOPERM, with an ACL file of an older version: the work itself goes on.
            self._has_answered = isinstance(error, redis.ResponseError)
        except Exception:  # a seam: keys that cannot be read are no reason to end every worker of the queue
            logger.exception("the queue's figures make no sense")
            self._latest = None
            self._has_answered = True
