from __future__ import annotations

import pytest

from tests.support.engine_stats import engine_stats
from worker.runtime.counts import PUBLISH_INTERVAL_S, EngineMeter, StepHistogram


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
