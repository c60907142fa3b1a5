"""A histogram that costs next to nothing to add to."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from itertools import accumulate


class StepHistogram:
    """Counts values by size. One thread adds; others may read meanwhile: what they read may lack the last value.

    Not prometheus_client's Histogram, whose `observe` takes a lock for the sum and one for the bucket.
    """

    def __init__(self, bounds: Sequence[float]) -> None:
        self._bounds = bounds  # upper ones, rising
        self._counts = [0] * (len(bounds) + 1)
        self._sum = 0.0

    @property
    def sum(self) -> float:
        """All values together."""
        return self._sum

    def add(self, value: float) -> None:
        """One more value."""
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def buckets(self) -> Iterator[tuple[str, float]]:
        """Upper bound, as Prometheus writes it, and how many values are not above it; `+Inf` last."""
        names = [*map(str, self._bounds), "+Inf"]
        return zip(names, accumulate(list(self._counts)), strict=True)
