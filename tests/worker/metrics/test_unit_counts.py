"""What a worker did with units and prompts, counted over a real registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import pytest

from settings import LimitSettings, WorkerSettings
from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptRecord
from worker.registry.lifecycle import Outcome, RunMode, StopReason
from worker.runtime.counts import CountedLeases, UnitCounts
from worker.runtime.held_units import HeldUnits
from worker.unit_closer import UnitCloser

CLAIM = Claim(UnitRef.shard("j", 0), "1:t", RunMode.RUN, None, 0, 5, "t", 0, 1, (0,))


@pytest.fixture
def counts() -> UnitCounts:
    return UnitCounts()


@pytest.fixture
def leases(registry: TestRegistry, counts: UnitCounts) -> CountedLeases:
    settings = WorkerSettings(lease_s=0.1, renew_interval_s=0.05)
    return CountedLeases(registry.redis, registry.keys, owner="tester", settings=settings, counts=counts)


Name = TypeVar("Name")


def _above_0(counters: Mapping[Name, int]) -> Mapping[Name, int]:
    return {name: count for name, count in counters.items() if count}


def test_every_label_is_there_from_the_start(counts: UnitCounts) -> None:
    assert set(counts.prompts) == set(Outcome)
    assert (len(counts.attempts), len(counts.ends)) == (2 * 3, 2 * 8)
    for counters in (counts.prompts.values(), counts.tokens.values(), counts.attempts.values(), counts.ends.values()):
        assert set(counters) == {0}


def test_records_count_by_outcome_and_with_their_tokens(
    registry: TestRegistry, leases: CountedLeases, counts: UnitCounts
) -> None:
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0, 1, 2]), 0))
    last = PromptRecord(2, Outcome.OK, "{}", 7, 4, 9, resumed_tokens=6, reasoning_tokens=1)
    leases.put(claim, [ok(0), PromptRecord(1, Outcome.LOST, "{}"), last])
    assert _above_0(counts.prompts) == {"ok": 2, "lost": 1}
    assert counts.tokens == {"prompt": 12, "cached": 6, "output": 12, "resumed": 6, "reasoning": 1}


def test_records_that_redis_did_not_take_do_not_count(
    registry: TestRegistry, leases: CountedLeases, counts: UnitCounts
) -> None:
    claim = must_claim(leases, UnitRef.shard(registry.running_job([0]), 0))
    leases.release(claim, count_attempt=False)
    leases.put(claim, [ok(0)])
    assert not _above_0(counts.prompts)


def test_a_unit_that_is_held_counts_by_which_attempt_it_is(counts: UnitCounts) -> None:
    held_units = HeldUnits(on_held=counts.add_attempt)
    for attempts in (0, 1, 2, 5):
        held_units.hold(replace(CLAIM, attempts=attempts), message_id="m")
    assert _above_0(counts.attempts) == {("shard", "1"): 1, ("shard", "2"): 1, ("shard", "3+"): 2}


def test_a_unit_that_the_reaper_closes_is_no_attempt_but_its_records_count(
    registry: TestRegistry, leases: CountedLeases, counts: UnitCounts
) -> None:
    job_id = registry.running_job([0, 1])
    registry.control.cancel(job_id)
    UnitCloser(leases, LimitSettings()).close_unclaimed(UnitRef.shard(job_id, 0))
    assert _above_0(counts.prompts) == {"cancelled": 2}
    assert (_above_0(counts.attempts), _above_0(counts.ends)) == ({}, {})


ENDS = [
    (None, False, RunMode.RUN, "finished"),
    (StopReason.FENCED, True, RunMode.RUN, "finished"),  # of a put whose first answer was lost
    (StopReason.FENCED, False, RunMode.RUN, "lease_lost"),
    (StopReason.RELEASED, False, RunMode.RUN, "released"),
    (StopReason.SENT_AWAY, False, RunMode.RUN, "sent_away"),
    (StopReason.FAILED, False, RunMode.RUN, "failed"),
    (StopReason.ENGINE_FAILED, False, RunMode.RUN, "engine_failed"),
    (StopReason.CANCELLED, False, RunMode.RUN, "cancelled"),
    (StopReason.EXPIRED, False, RunMode.RUN, "expired"),
    (None, False, RunMode.EXPIRED, "expired"),
    (None, False, RunMode.LOST, "finished"),
]


@pytest.mark.parametrize(("reason", "is_written", "mode", "end"), ENDS)
def test_a_unit_counts_by_why_it_is_held_no_more(
    counts: UnitCounts, reason: StopReason | None, is_written: bool, mode: RunMode, end: str
) -> None:
    held_units = HeldUnits(on_removed=counts.add_end)
    held = held_units.hold(replace(CLAIM, mode=mode), message_id="m")
    if reason is not None:
        held.stop(reason)
    if is_written:
        held.set_written()
    held_units.remove(held)
    assert _above_0(counts.ends) == {("shard", end): 1}


def test_every_reason_to_stop_has_a_name(counts: UnitCounts) -> None:
    assert {reason for reason, *_ in ENDS if reason} == set(StopReason)
