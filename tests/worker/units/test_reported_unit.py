from __future__ import annotations

import logging
from contextlib import suppress

import pytest
import structlog

from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import StopReason
from worker.runtime.held_units import HeldUnit, reported
from worker.tracing.spans import UnitSpan

TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"


class RecordingSpan(UnitSpan):
    """Remembers how it ended."""

    def __init__(self) -> None:
        super().__init__(TRACEPARENT)
        self.ends: list[tuple[str, bool]] = []

    def end(self, outcome: str, *, is_error: bool) -> None:
        self.ends.append((outcome, is_error))


def held_unit(registry: TestRegistry, *, is_plan: bool = False) -> tuple[HeldUnit, RecordingSpan]:
    span = RecordingSpan()
    ref = UnitRef.plan(registry.submit([b"x"])) if is_plan else UnitRef.shard(registry.running_job([0, 1]), 0)
    return HeldUnit(must_claim(registry.leases(), ref), message_id="m", span=span), span


def messages(caplog: pytest.LogCaptureFixture) -> list[tuple[str, str]]:
    return [(record.levelname, record.message) for record in caplog.records]


@pytest.mark.parametrize(
    ("reason", "outcome", "is_error"),
    [
        (None, "done", False),
        (StopReason.CANCELLED, "cancelled", False),
        (StopReason.SENT_AWAY, "given back", False),
        (StopReason.RELEASED, "given back", False),
        (StopReason.FAILED, "failed", True),
        (StopReason.ENGINE_FAILED, "given back, the engine failed", True),
        (StopReason.FENCED, "no longer ours", True),
    ],
)
def test_a_shard_is_logged_and_traced_from_its_claim_to_its_outcome(
    registry: TestRegistry,
    caplog: pytest.LogCaptureFixture,
    reason: StopReason | None,
    outcome: str,
    is_error: bool,
) -> None:
    caplog.set_level(logging.INFO)
    held, span = held_unit(registry)

    with reported(held):
        assert span.ends == []
        if reason is not None:
            held.stop(reason)

    assert messages(caplog) == [("INFO", "shard claimed"), ("WARNING" if is_error else "INFO", f"shard {outcome}")]
    assert caplog.records[0].__dict__["prompts"] == 2
    assert span.ends == [(outcome, is_error)]


def test_an_error_met_while_it_is_given_back_is_no_failure_of_it(registry: TestRegistry) -> None:
    held, span = held_unit(registry)

    with suppress(OSError), reported(held):
        held.stop(StopReason.RELEASED)
        raise OSError("Redis is away")

    assert span.ends == [("given back", False)]


def test_one_that_was_written_before_it_was_to_stop_is_done(registry: TestRegistry) -> None:
    held, span = held_unit(registry)

    with reported(held):
        held.set_written()
        held.stop(StopReason.RELEASED)

    assert span.ends == [("done", False)]


def test_one_over_which_something_is_raised_has_failed(
    registry: TestRegistry, caplog: pytest.LogCaptureFixture
) -> None:
    held, span = held_unit(registry)

    with suppress(ZeroDivisionError), reported(held):
        raise ZeroDivisionError

    assert messages(caplog) == [("WARNING", "shard failed")]  # at the level of warnings
    assert span.ends == [("failed", True)]


def test_a_plan_that_goes_well_is_not_mentioned(registry: TestRegistry, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)
    held, span = held_unit(registry, is_plan=True)

    with reported(held):
        pass

    assert messages(caplog) == []
    assert span.ends == [("done", False)]


def test_whatever_is_logged_meanwhile_has_job_shard_and_trace(registry: TestRegistry) -> None:
    held, _ = held_unit(registry)

    with reported(held):
        bound = structlog.contextvars.get_contextvars()

    assert bound == {"job_id": held.claim.ref.job_id, "shard": 0, "trace_id": "0af7651916cd43dd8448eb211c80319c"}
    assert structlog.contextvars.get_contextvars() == {}
