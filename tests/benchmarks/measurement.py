"""What one case took."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch

from tests.benchmarks.case import Case

# Median microseconds of a run, with an optional action before each run that is not timed.
MedianUs = Callable[[Callable[[], object], Callable[[], None] | None], float]


@dataclass(frozen=True)
class Measurement:
    """Times of one case, ours and the best library call's."""

    case: Case
    amount: int = 0
    formula: str = ""
    time_us: float | None = None  # None: failed, see error
    library: str = ""  # the fastest one that ran
    library_us: float | None = None
    error: str = ""
    failed_libraries: dict[str, str] = field(default_factory=dict)  # name -> why

    def percent(self, rate_per_s: float) -> float | None:
        """Share of the bound that was reached: amount / time / rate."""
        return None if self.time_us is None else 100 * self.amount / (self.time_us / 1e6) / rate_per_s

    @property
    def ratio(self) -> float | None:
        """Time of the library call / our time: above 1 we are faster."""
        return None if self.time_us is None or self.library_us is None else self.library_us / self.time_us


def measure(case: Case, device: torch.device, median_us: MedianUs) -> Measurement:
    """Allocate, run ours and every library call. What fails is recorded, so that one failure costs one figure."""
    try:
        work = case.prepare(device)
        time_us = median_us(work.run, work.restore)
    except Exception as error:  # a seam: kernels raise what torch, triton and the driver raise
        return Measurement(case, error=_one_line(error))
    library_us: dict[str, float] = {}
    failed: dict[str, str] = {}
    for name, run in work.libraries.items():
        try:
            library_us[name] = median_us(run, work.restore)
        except Exception as error:  # the same seam; a library that lacks the operation says so in many ways
            failed[name] = _one_line(error)
    best = min(library_us, key=lambda name: library_us[name], default="")
    return Measurement(case, work.amount, work.formula, time_us, best, library_us.get(best), "", failed)


def _one_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return f"{type(error).__name__}: {lines[0] if lines else ''}"[:200]
