"""What a worker counts of units, prompts, engine steps and queues, over a real registry."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TypeVar

import pytest
import redis

from settings import LimitSettings, WorkerSettings
from tests.support.fake_engine import engine_stats
from tests.support.processes import running_thread, wait_until
from tests.support.registry import TestRegistry, must_claim, ok
from worker.registry.keys import UnitRef
from worker.registry.leases import Claim, PromptRecord
from worker.registry.lifecycle import Outcome, RunMode, StopReason
from worker.registry.queues import QueueFigures, QueueReading
from worker.runtime.counts import PUBLISH_INTERVAL_S, CountedLeases, EngineMeter, QueueReader, StepHistogram, UnitCounts
from worker.runtime.held_units import HeldUnits
from worker.unit_closer import UnitCloser

CLAIM = Claim(UnitRef.shard("j", 0), "1:t", RunMode.RUN, None, 0, 5, "t", 0, 1, (0,))

Name = TypeVar("Name")

ENDS = [
    (None, False, RunMode.RUN, "finished"),
    (StopReason.FENCED, True, RunMode.RUN, "finished"),  # of a put whose first answer was lost
    (StopReason.REWOUND, False, RunMode.RUN, "rewound"),
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


@pytest.fixture
def counts() -> UnitCounts:
    return UnitCounts()


@pytest.fixture
def leases(registry: TestRegistry, counts: UnitCounts) -> CountedLeases:
    settings = WorkerSettings(lease_s=0.1, renew_interval_s=0.05)
    return CountedLeases(
        registry.redis, registry.keys, owner="tester", settings=settings, models=["fake"], counts=counts
    )


def _above_0(counters: Mapping[Name, int]) -> Mapping[Name, int]:
    return {name: count for name, count in counters.items() if count}


def test_every_label_is_there_from_the_start(counts: UnitCounts) -> None:
    assert set(counts.prompts) == set(Outcome)
    assert (len(counts.attempts), len(counts.ends)) == (2 * 3, 2 * 9)
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


def _count(histogram: StepHistogram) -> float:
    return list(histogram.buckets())[-1][1]


def test_before_the_engine_is_loaded_there_are_no_figures() -> None:
    assert EngineMeter().stats is None


def test_a_step_is_counted_by_its_time_its_sequences_and_its_tokens() -> None:
    meter = EngineMeter()
    meter.step(0.25, (7, 40))
    meter.step(0.5, (1, 1))
    assert (meter.step_seconds.sum, meter.step_sequences.sum, meter.step_tokens.sum) == (0.75, 8, 41)


def test_a_call_that_only_takes_the_answers_of_the_step_before_has_no_size() -> None:
    meter = EngineMeter()
    meter.step(0.25, (0, 0))
    assert [_count(item) for item in (meter.step_seconds, meter.step_sequences, meter.step_tokens)] == [1, 0, 0]


def test_figures_are_due_again_after_a_while(monkeypatch: pytest.MonkeyPatch) -> None:
    now_s = [1000.0]
    monkeypatch.setattr("time.monotonic", lambda: now_s[0])
    meter, stats = EngineMeter(), engine_stats(num_steps=3)
    found = [meter.is_due]
    meter.publish(stats)
    found.append(meter.is_due)
    now_s[0] += PUBLISH_INTERVAL_S
    assert [*found, meter.is_due] == [True, False, True]
    assert meter.stats is stats


def test_a_value_counts_in_every_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = StepHistogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 5.0):
        histogram.add(value)
    assert list(histogram.buckets()) == [("1.0", 2), ("2.0", 3), ("4.0", 4), ("+Inf", 5)]
    assert histogram.sum == 12.0


class Figures(QueueFigures):
    """The figures of a real queue, or an error that is raised instead."""

    def __init__(self, registry: TestRegistry) -> None:
        super().__init__(registry.directory(), registry.keys, max_tenants=20)
        self.error: Exception | None = None
        self.num_reads = 0

    def read(self) -> QueueReading:
        self.num_reads += 1
        if self.error is not None:
            raise self.error
        return super().read()


@pytest.fixture
def figures(registry: TestRegistry) -> Figures:
    return Figures(registry)


def test_it_reads_once_in_an_interval_whoever_asks(figures: Figures) -> None:
    reader = QueueReader(figures, interval_s=600.0)
    with running_thread(reader.run):
        wait_until(lambda: reader.latest)
        assert all(reader.latest for _ in range(1000))
    assert figures.num_reads == 1
    with running_thread(QueueReader(figures, interval_s=0.01).run):
        wait_until(lambda: figures.num_reads >= 3)


def test_what_cannot_be_read_is_not_known(figures: Figures) -> None:
    reader = QueueReader(figures, interval_s=0.01)
    with running_thread(reader.run):
        wait_until(lambda: reader.latest)
        figures.error = redis.ConnectionError("gone")
        wait_until(lambda: reader.latest is None)
        assert not reader.has_answered
        figures.error = None
        wait_until(lambda: reader.latest)
        assert reader.has_answered


def test_a_refusal_is_an_answer(figures: Figures) -> None:
    figures.error = redis.exceptions.NoPermissionError("an ACL file of an older version")
    reader = QueueReader(figures, interval_s=0.01)
    with running_thread(reader.run):
        wait_until(lambda: figures.num_reads > 1)
    assert reader.latest is None
    assert reader.has_answered


def test_keys_that_make_no_sense_cost_the_figures_alone(figures: Figures, caplog: pytest.LogCaptureFixture) -> None:
    figures.error = ValueError("invalid literal for int()")
    reader = QueueReader(figures, interval_s=0.01)
    with running_thread(reader.run):
        wait_until(lambda: figures.num_reads > 1)
        assert reader.latest is None
        assert reader.has_answered
        figures.error = None
        wait_until(lambda: reader.latest)
    assert "the queue's figures make no sense" in caplog.text
