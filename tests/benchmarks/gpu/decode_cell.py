"""Decode steps at one batch size."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from tests.benchmarks.gpu.step_counts import StepCounts


@dataclass(frozen=True)
class DecodeCell:
    """One batch size."""

    batch: int
    context_tokens: float  # mean over the sequences and the timed steps
    step_ms: tuple[float, ...]  # a step's mean of each time taken
    limit_ms: float
    allocations: float | None  # of the caching allocator, a step; None without a GPU
    replays: float | None  # of graphs, a step; None where steps are not captured
    counts: StepCounts | None  # None without a GPU

    @property
    def median_ms(self) -> float:
        """Of the times taken."""
        return median(self.step_ms)

    @property
    def tokens_per_s(self) -> float:
        """Generated."""
        return self.batch / self.median_ms * 1e3

    @property
    def percent(self) -> float:
        """Of what memory and arithmetic allow."""
        return 100 * self.limit_ms / self.median_ms
