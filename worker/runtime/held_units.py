"""Keeps the units that this process holds a lease on, and logs and traces what becomes of them."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace

from structlog.contextvars import bound_contextvars

from engine.request import RequestOutput
from worker.lines.request_line import Endpoint, RequestLine
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim
from worker.registry.lifecycle import PutStatus, RunMode, StopReason
from worker.tracing.spans import TracedRequest, Tracing, UnitSpan
from worker.unit_closer import UnitCloser

logger = logging.getLogger(__name__)

_OPERATIONS = {
    Endpoint.CHAT_COMPLETIONS: "chat",
    Endpoint.COMPLETIONS: "text_completion",
    Endpoint.RESPONSES: "chat",
    Endpoint.EMBEDDINGS: "embeddings",
    Endpoint.SCORE: "score",
    Endpoint.RERANK: "rerank",
    Endpoint.CLASSIFY: "classify",
}


class HeldUnit:
    """A claimed unit: what other threads tell its owner, the thread that works on it. Thread-safe."""

    def __init__(self, claim: Claim, *, message_id: str, span: UnitSpan | None = None) -> None:
        self.claim = claim
        self.message_id = message_id  # of the Celery message that brought it
        self.span = span or UnitSpan()
        self._changed = threading.Condition()
        self._stop_reason: StopReason | None = None
        self._is_settled = False
        self._is_written = False
        self._num_unwritten = 0
        self._deadline_at: float | None = None
        self._released_at: float | None = None
        self._on_change: Callable[[], None] = lambda: None
        self.set_time_left(claim.time_left_s)

    @property
    def log_fields(self) -> dict[str, str | int]:
        """What every log event about it says."""
        trace_id = self.span.trace_id
        return self.claim.ref.log_fields if trace_id is None else {**self.claim.ref.log_fields, "trace_id": trace_id}

    @property
    def stop_reason(self) -> StopReason | None:
        """Why the owner should stop, if it should."""
        return self._stop_reason

    @property
    def is_lost(self) -> bool:
        """Whether it is not ours any more: nothing more is written."""
        return self._stop_reason is not None and self._stop_reason.is_loss

    @property
    def is_written(self) -> bool:
        """Whether all records of the unit are in Redis."""
        return self._is_written

    @property
    def is_past_deadline(self) -> bool:
        """Whether the job's deadline has passed, by what Redis last said of it."""
        return self._deadline_at is not None and time.monotonic() >= self._deadline_at

    @property
    def released_for_s(self) -> float:
        """How long ago it was first asked to be given back; 0 if it was not."""
        return 0.0 if self._released_at is None else time.monotonic() - self._released_at

    def set_time_left(self, time_left_s: float | None) -> None:
        """Note the time until the job's deadline, as Redis says; None: it has none."""
        self._deadline_at = None if time_left_s is None else time.monotonic() + time_left_s

    def on_change(self, call: Callable[[], None]) -> None:
        """Have `call` called, on any thread, when there is a reason to stop or everything is written."""
        self._on_change = call

    def stop(self, reason: StopReason) -> None:
        """Tell the owner to stop; a greater reason replaces a smaller one, until `settle`."""
        with self._changed:
            if not self._is_settled and (self._stop_reason is None or reason > self._stop_reason):
                self._stop_reason = reason
            if reason >= StopReason.RELEASED and self._released_at is None:
                self._released_at = time.monotonic()
            self._changed.notify_all()
        self._on_change()

    def settle(self, reason: StopReason | None) -> None:
        """Note why it ended, now that its owner has closed it or given it back.

        The lease ended with that, and a renewal sent before would take the unit for lost to another worker.
        """
        with self._changed:
            self._stop_reason = reason
            self._is_settled = True

    def close(self, closer: UnitCloser, indices: Sequence[int], mode: RunMode) -> None:
        """Write the error records of these prompts, and settle if they were the last. Raises redis.RedisError."""
        if closer.close(self.claim, indices, mode):
            self.settle(mode.stop_reason)

    def hear(self, status: PutStatus, mode: RunMode) -> None:
        """Act on the answer to a write: the unit is lost, finished, or to be run in `mode`."""
        if status is PutStatus.REWOUND:
            logger.error(
                "Redis has lost records that it had taken: the unit goes back", extra=self.claim.ref.log_fields
            )
            self.stop(StopReason.REWOUND)
        elif status is PutStatus.FENCED:
            self.stop(StopReason.FENCED)
        elif status is not PutStatus.OPEN:
            self.set_written()
        else:
            self.hear_mode(mode)

    def hear_mode(self, mode: RunMode) -> None:
        """Tell the owner to stop, unless `mode` says to run the unit."""
        reason = mode.stop_reason
        if reason is not None:
            self.stop(reason)

    def add_unwritten(self, count: int) -> None:
        """Note that `count` records were handed to the writer or, below 0, left it."""
        with self._changed:
            self._num_unwritten += count
            self._changed.notify_all()

    def set_written(self) -> None:
        """Note that every record of the unit is in Redis."""
        with self._changed:
            self._is_written = True
            self._changed.notify_all()
        self._on_change()

    def wait_flushed(self, until: StopReason | None = None, timeout_s: float | None = None) -> bool:
        """Wait until the writer has none of our records; False if it took too long or a reason >= `until` came."""
        with self._changed:
            self._changed.wait_for(
                lambda: self._num_unwritten == 0 or (until is not None and (self._stop_reason or 0) >= until),
                timeout=timeout_s,
            )
            return self._num_unwritten == 0


class HeldUnits:
    """The units this process holds a lease on. Thread-safe."""

    def __init__(
        self,
        tracing: Tracing | None = None,
        *,
        on_held: Callable[[HeldUnit], None] = lambda _: None,
        on_removed: Callable[[HeldUnit], None] = lambda _: None,
    ) -> None:
        self._tracing = tracing or Tracing()
        self._on_held = on_held
        self._on_removed = on_removed
        self._changed = threading.Condition()
        self._held: dict[UnitRef, HeldUnit] = {}
        self._stopped: dict[str, StopReason] = {}  # by message whose unit is not held, perhaps being claimed

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ref: UnitRef) -> bool:
        with self._changed:
            return ref in self._held

    def hold(self, claim: Claim, *, message_id: str) -> HeldUnit:
        """Keep a unit that was claimed on this Celery message, and begin the span of its work."""
        span = self._tracing.hold(claim)
        held = HeldUnit(replace(claim, traceparent=span.traceparent), message_id=message_id, span=span)
        with self._changed:
            self._held[claim.ref] = held
            reason = self._stopped.pop(message_id, None)
        self._on_held(held)
        if reason is not None:
            held.stop(reason)
        return held

    def remove(self, held: HeldUnit) -> None:
        """Forget a unit whose owner is done with it."""
        with self._changed:
            if self._held.get(held.claim.ref) is held:
                del self._held[held.claim.ref]
            self._changed.notify_all()
        self._on_removed(held)

    def all(self) -> list[HeldUnit]:
        """The units at this moment."""
        with self._changed:
            return list(self._held.values())

    def stop_all(self, reason: StopReason) -> None:
        """Tell every owner to stop."""
        for held in self.all():
            held.stop(reason)

    def send_shards_away(self) -> None:
        """Ask for every shard to be given back, as a suspect is to run alone."""
        for held in self.all():
            if not held.claim.ref.is_plan:
                held.stop(StopReason.SENT_AWAY)

    def stop_message(self, message_id: str, reason: StopReason) -> None:
        """Tell the owner of a Celery message's unit to stop, as soon as the unit is held if it is not yet."""
        with self._changed:
            found = [held for held in self._held.values() if held.message_id == message_id]
            if not found:
                self._stopped[message_id] = reason
        for held in found:
            held.stop(reason)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is held; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout=timeout_s)


@contextmanager
def reported(held: HeldUnit) -> Iterator[None]:
    """Log the unit's beginning and end, and end its span; what this thread logs in the block has the unit's ids.

    Of a plan only a failure is logged above debug: the planner logs what it did.
    """
    kind, began_s = held.claim.ref.kind, time.monotonic()
    level = logging.DEBUG if held.claim.ref.is_plan else logging.INFO
    prompts = len(held.claim.missing)
    fields: dict[str, int | str] = {"prompts": prompts}
    if held.claim.attempts:
        fields["attempts"] = held.claim.attempts
    if held.claim.mode is not RunMode.RUN:
        fields["mode"] = held.claim.mode.value
    has_failed = True
    with bound_contextvars(**held.log_fields):
        logger.log(level, "%s claimed", kind, extra=fields)
        try:
            yield
            has_failed = False
        finally:
            # The reason to stop says more than the error that followed from it.
            reason = None if held.is_written else held.stop_reason
            if has_failed and held.stop_reason is None:
                reason = StopReason.FAILED
            outcome, is_error = (reason.log_text, reason.is_error) if reason else ("done", False)
            held.span.end(outcome, is_error=is_error)
            elapsed_s = round(time.monotonic() - began_s, 3)
            level = logging.WARNING if is_error else level
            logger.log(level, "%s %s", kind, outcome, extra={"prompts": prompts, "elapsed_s": elapsed_s})


def trace_request(span: UnitSpan, line: RequestLine, output: RequestOutput) -> None:
    """Add a request, unless nothing was run for it: it was refused, or an equal one was run."""
    timings = output.timings
    if timings is None or timings.scheduled_s is None:
        return
    span.add_request(
        TracedRequest(
            index=line.index,
            operation=_OPERATIONS[line.endpoint],
            arrived_s=timings.arrived_s,
            scheduled_s=timings.scheduled_s,
            first_token_s=timings.first_token_s,
            finished_s=timings.finished_s,
            input_tokens=output.num_prompt_tokens,
            cached_tokens=output.num_cached_tokens,
            output_tokens=sum(len(completion.token_ids) for completion in output.completions),
            finish_reasons=tuple(completion.finish_reason.value for completion in output.completions),
            error_type=None if output.error is None else type(output.error).__name__,
        )
    )
