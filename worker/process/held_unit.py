"""A unit this process holds a lease on."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

from worker.registry.claim import Claim
from worker.registry.put_status import PutStatus
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason
from worker.tracing.unit_span import UnitSpan


class HeldUnit:
    """A claimed unit while it is worked on: what the threads around it tell its owner. Thread-safe."""

    def __init__(self, claim: Claim, *, message_id: str, span: UnitSpan | None = None) -> None:
        self.claim = claim
        self.message_id = message_id  # of the Celery message that brought it
        self.span = span or UnitSpan()
        self._changed = threading.Condition()
        self._stop_reason: StopReason | None = None
        self._is_written = False
        self._num_unwritten = 0
        self._deadline_at: float | None = None
        self._released_at: float | None = None
        self._on_change: Callable[[], None] = lambda: None
        self.set_time_left(claim.time_left_s)

    @property
    def log_fields(self) -> dict[str, str | int]:
        """What every log event about it is to say."""
        trace_id = self.span.trace_id
        return self.claim.ref.log_fields if trace_id is None else {**self.claim.ref.log_fields, "trace_id": trace_id}

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the owner should stop, if it should."""
        return self._stop_reason

    @property
    def is_written(self) -> bool:
        """Whether all records of the unit are in Redis."""
        return self._is_written

    @property
    def is_past_deadline(self) -> bool:
        """Whether the job's deadline has passed, by the time Redis last told."""
        return self._deadline_at is not None and time.monotonic() >= self._deadline_at

    @property
    def released_for_s(self) -> float:
        """How long ago it was first to be given back; 0 if it is not."""
        return 0.0 if self._released_at is None else time.monotonic() - self._released_at

    def set_time_left(self, time_left_s: float | None) -> None:
        """What Redis says is left until the job's deadline; None: it has none."""
        self._deadline_at = None if time_left_s is None else time.monotonic() + time_left_s

    def on_change(self, call: Callable[[], None]) -> None:
        """Call `call` whenever there is a reason to stop or everything is written; from any thread."""
        self._on_change = call

    def stop(self, reason: StopReason) -> None:
        """Tell the owner to stop; a greater reason replaces a smaller one."""
        with self._changed:
            if self._stop_reason is None or reason > self._stop_reason:
                self._stop_reason = reason
            if reason >= StopReason.RELEASED and self._released_at is None:
                self._released_at = time.monotonic()
            self._changed.notify_all()
        self._on_change()

    def hear(self, status: PutStatus, mode: RunMode) -> None:
        """What a write's answer means for the unit: it is lost, all written, or to be run in `mode`."""
        if status is PutStatus.FENCED:
            self.stop(StopReason.FENCED)
        elif status is not PutStatus.OPEN:
            self.set_written()
        else:
            self.hear_mode(mode)

    def hear_mode(self, mode: RunMode) -> None:
        """Whoever runs the unit is to stop, unless `mode` says to run it."""
        reason = StopReason.of_mode(mode)
        if reason is not None:
            self.stop(reason)

    def add_unwritten(self, count: int) -> None:
        """`count` records were handed to the writer, or, below 0, left it."""
        with self._changed:
            self._num_unwritten += count
            self._changed.notify_all()

    def set_written(self) -> None:
        """Every record of the unit is in Redis."""
        with self._changed:
            self._is_written = True
            self._changed.notify_all()
        self._on_change()

    def wait_flushed(self, until: StopReason, timeout_s: float | None = None) -> bool:
        """Wait until the writer has none of our records; False if a reason of at least `until`, or time, ends it."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_unwritten == 0 or (self._stop_reason or 0) >= until, timeout=timeout_s
            )
            return self._num_unwritten == 0
