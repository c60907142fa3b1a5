"""Two sides on one workload."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median
from typing import Protocol

from tests.benchmarks.peers.servers.trial_loop import TrialAnswer
from tests.benchmarks.peers.workload import Workload


class Side(Protocol):
    """Runs a trial. `TrialServer` is one."""

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer: ...


@dataclass(frozen=True)
class Comparison:
    """Seconds of each trial, first of ours and then of the other side; trial by trial they had the same prompts."""

    workload: Workload
    our_s: tuple[float, ...]
    other_s: tuple[float, ...]  # empty: only ours was measured
    stolen: tuple[float, ...]  # share of the CPUs that the hypervisor took, of each pair the trial that suffered more
    num_repeated: int  # pairs that did not count, because it took too much
    same_first_token: float  # share of the requests whose first token both chose; 1.0 where only ours was measured

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our time over the other's of each trial; below 1 ours is faster."""
        return tuple(ours / other for ours, other in zip(self.our_s, self.other_s, strict=bool(self.other_s)))

    @property
    def ratio(self) -> float | None:
        """Median of the trials."""
        return median(self.ratios) if self.other_s else None
