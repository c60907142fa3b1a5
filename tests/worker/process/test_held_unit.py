from __future__ import annotations

import pytest

from tests.support.registry import TestRegistry, must_claim
from worker.registry.keys import UnitRef
from worker.registry.lifecycle import PutStatus, RunMode, StopReason
from worker.runtime.held_units import HeldUnit


@pytest.mark.parametrize(
    ("status", "mode", "reason", "is_written"),
    [
        (PutStatus.OPEN, RunMode.RUN, None, False),
        (PutStatus.OPEN, RunMode.CANCELLED, StopReason.CANCELLED, False),
        (PutStatus.OPEN, RunMode.EXPIRED, StopReason.EXPIRED, False),
        (PutStatus.FENCED, RunMode.CANCELLED, StopReason.FENCED, False),
        (PutStatus.UNIT_DONE, RunMode.CANCELLED, None, True),
        (PutStatus.JOB_DONE, RunMode.RUN, None, True),
    ],
)
def test_a_writes_answer_says_whether_to_go_on(
    registry: TestRegistry, status: PutStatus, mode: RunMode, reason: StopReason | None, is_written: bool
) -> None:
    claim = must_claim(registry.leases(), UnitRef.shard(registry.running_job([0]), 0))
    held, calls = HeldUnit(claim, message_id="m"), list[None]()
    held.on_change(lambda: calls.append(None))

    held.hear(status, mode)

    assert (held.stop_reason, held.is_written) == (reason, is_written)
    assert len(calls) == (reason is not None or is_written)
