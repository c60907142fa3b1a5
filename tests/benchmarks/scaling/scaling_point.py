"""The cost of one size."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean


@dataclass(frozen=True)
class ScalingPoint:
    """Median of the rounds."""

    axis: str
    size: int
    num_tokens: int  # read and written by all requests
    seconds: float
    flop: float  # of products and attention

    @property
    def us_per_token(self) -> float:
        """Microseconds."""
        return self.seconds / self.num_tokens * 1e6

    @property
    def flop_per_token(self) -> float:
        """Grows with the length of the context: attention."""
        return self.flop / self.num_tokens


def exponent(sizes: Sequence[float], costs: Sequence[float]) -> float:
    """b of the least-squares line log cost = a + b log size: 1 where cost is proportional to size."""
    xs, ys = [math.log(size) for size in sizes], [math.log(cost) for cost in costs]
    x_mean, y_mean = fmean(xs), fmean(ys)
    spread = sum((x - x_mean) ** 2 for x in xs)
    return sum((x - x_mean) * (y - y_mean) for x, y in zip(xs, ys, strict=True)) / spread
