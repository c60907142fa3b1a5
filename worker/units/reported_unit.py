"""What logs and traces say of a unit that is held."""

from __future__ import annotations

import logging
import time
from collections.abc import Iterator
from contextlib import contextmanager

from structlog.contextvars import bound_contextvars

from worker.process.held_unit import HeldUnit
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason

_FAILED = "failed"
_OUTCOMES = {
    StopReason.CANCELLED: "cancelled",
    StopReason.EXPIRED: "expired",
    StopReason.SENT_AWAY: "given back",
    StopReason.RELEASED: "given back",
    StopReason.FAILED: _FAILED,
    StopReason.ENGINE_FAILED: "given back, the engine failed",
    StopReason.FENCED: "no longer ours",
}
_BAD_OUTCOMES = {_FAILED, _OUTCOMES[StopReason.ENGINE_FAILED], _OUTCOMES[StopReason.FENCED]}

logger = logging.getLogger(__name__)


@contextmanager
def reported(held: HeldUnit) -> Iterator[None]:
    """Log its beginning and its end and end its span; whatever this thread logs within the block has its ids.

    Of a plan that goes well the planner has said all there is to say.
    """
    is_plan, began_s = held.claim.ref.is_plan, time.monotonic()
    kind, level = ("plan", logging.DEBUG) if is_plan else ("shard", logging.INFO)
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
            # What stopped it says more than the error that this thread met then: Redis away, say.
            outcome = _FAILED if has_failed and held.stop_reason is None else _outcome(held)
            is_error = outcome in _BAD_OUTCOMES
            held.span.end(outcome, is_error=is_error)
            elapsed_s = round(time.monotonic() - began_s, 3)
            level = logging.WARNING if is_error else level
            logger.log(level, "%s %s", kind, outcome, extra={"prompts": prompts, "elapsed_s": elapsed_s})


def _outcome(held: HeldUnit) -> str:
    return "done" if held.is_written or held.stop_reason is None else _OUTCOMES[held.stop_reason]
