from __future__ import annotations

from worker.runtime.counts import StepHistogram


def test_a_value_counts_in_every_bucket_whose_bound_it_does_not_exceed() -> None:
    histogram = StepHistogram((1.0, 2.0, 4.0))
    for value in (0.5, 1.0, 1.5, 4.0, 5.0):
        histogram.add(value)
    assert list(histogram.buckets()) == [("1.0", 2), ("2.0", 3), ("4.0", 4), ("+Inf", 5)]
    assert histogram.sum == 12.0
