"""Lets a suspect, a unit over which workers died, run alone."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

# How long running units may finish by themselves before they are sent away: enough for the last prompts of a shard, and
# short beside the prefill that has to be repeated for a shard sent away.
COMPANY_WAIT_S = 2.0
SEND_AWAY_INTERVAL_S = 0.2  # again and again: a unit that was being claimed was not among those told


class Quarantine:
    """Lets units share the worker, or one suspect have it to itself, so that a crash shows which unit caused it.

    One suspect at a time waits for the worker, and meanwhile nothing else enters: of suspects that follow each other
    only the first sends units away. A thread that waits here has claimed nothing, so a crash blames no unit for it.
    """

    def __init__(self, send_away: Callable[[], None], is_empty: Callable[[], bool]) -> None:
        self._send_away = send_away  # asks for all units that entered to be given back; does not wait
        self._is_empty = is_empty  # whether the engine holds nothing of theirs any more
        self._changed = threading.Condition()
        self._num_together = 0
        self._is_taken = False  # a suspect runs
        self._is_wanted = False  # a suspect waits
        self._is_closed = False

    def enter(self, timeout_s: float) -> bool:
        """Share the worker until `leave`; False if it stays a suspect's for so long, or is closed."""
        with self._changed:
            self._changed.wait_for(lambda: self._is_open or self._is_closed, timeout_s)
            if not self._is_open:
                return False
            self._num_together += 1
            return True

    def leave(self) -> None:
        """End what `enter` began."""
        with self._changed:
            self._num_together -= 1
            self._changed.notify_all()

    def enter_alone(self, timeout_s: float) -> bool:
        """Have the worker alone until `leave_alone`.

        False if another suspect waits or runs for longer than `timeout_s`, or if closed. Other units, and the engine's
        step for them, were asked to end and are waited for without a limit.
        """
        with self._changed:
            if self._is_wanted or self._is_closed:
                return False
            self._is_wanted = True
            try:
                if not (self._wait_for_suspect(timeout_s) and self._wait_for_company()):
                    return False
                self._is_taken = True
                return True
            finally:
                self._is_wanted = False
                self._changed.notify_all()

    def leave_alone(self) -> None:
        """End what `enter_alone` began."""
        with self._changed:
            self._is_taken = False
            self._changed.notify_all()

    def close(self) -> None:
        """Refuse all units from now on, those that wait too."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()

    @property
    def _is_open(self) -> bool:
        return not (self._is_taken or self._is_wanted or self._is_closed)

    def _wait_for_suspect(self, timeout_s: float) -> bool:
        self._changed.wait_for(lambda: not self._is_taken or self._is_closed, timeout_s)
        return not self._is_taken and not self._is_closed

    def _wait_for_company(self) -> bool:
        patient_until_s = time.monotonic() + COMPANY_WAIT_S
        while (self._num_together or not self._is_empty()) and not self._is_closed:
            if time.monotonic() >= patient_until_s:
                self._send_away()
            self._changed.wait(SEND_AWAY_INTERVAL_S)
        return not self._is_closed
