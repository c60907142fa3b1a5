"""Finding work nobody does."""

from __future__ import annotations

import logging
import random
import threading
from collections.abc import Callable

import redis

from worker.broker.announcer import Announcer
from worker.registry.reap_queue import ReapQueue
from worker.units.unit_closer import UnitCloser

logger = logging.getLogger(__name__)


class Reaper:
    """Announces units again whose message was lost or whose worker died, and closes those whose job is to end.

    Every worker runs one on its own thread; the registry gives each due unit to one of them.
    """

    def __init__(
        self,
        due_units: ReapQueue,
        announcer: Announcer,
        closer: UnitCloser,
        *,
        interval_s: float,
        is_well: Callable[[], bool],
    ) -> None:
        self._due_units = due_units
        self._announcer = announcer
        self._closer = closer
        self._is_well = is_well  # a worker that hangs must not put units off that others could take
        self._interval_s = interval_s

    def run(self, stopping: threading.Event) -> None:
        """Look again and again, until told to stop."""
        # Jitter, so that workers started together do not look together for ever.
        while not stopping.wait(self._interval_s * random.uniform(0.75, 1.25)):
            if not self._is_well():
                continue
            try:
                self._look(stopping)
            except redis.RedisError as error:
                logger.warning("could not look for work nobody does: %s", error)

    def _look(self, stopping: threading.Event) -> None:
        for due in self._due_units.due():
            if stopping.is_set():
                return  # what was put off here is due again after its grace
            if due.should_close:
                self._closer.close_unclaimed(due.ref)
            else:
                logger.info("announcing the unit again", extra=due.ref.log_fields)
                self._announcer.announce(due.ref, due.priority)
