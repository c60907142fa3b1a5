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
    same_first_token: float  # share of the requests whose first token both chose; 1.0 where only ours was measured

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our time over the other's of each trial; below 1 ours is faster."""
        return tuple(ours / other for ours, other in zip(self.our_s, self.other_s, strict=bool(self.other_s)))

    @property
    def ratio(self) -> float | None:
        """Median of the trials."""
        return median(self.ratios) if self.other_s else None


def compare(workload: Workload, ours: Side, other: Side | None, *, trials: int, is_sorted: bool = False) -> Comparison:
    """A warm-up and `trials` trials of both sides in turn, each trial with prompts of its own; which side is first
    alternates too. With `is_sorted` the other side gets its prompts in order of their tokens.
    """
    our_s, other_s, agreements = [], [], []
    for trial in range(trials + 1):
        prompts = workload.prompts(trial)
        order = sorted(range(len(prompts)), key=prompts.__getitem__) if is_sorted else list(range(len(prompts)))
        theirs_first = other is not None and trial % 2 == 1
        first = _run_other(other, prompts, order, workload) if theirs_first else None
        mine = ours.run(prompts, workload.max_tokens)
        theirs = first or _run_other(other, prompts, order, workload)
        if trial == 0:
            continue  # the warm-up
        our_s.append(mine["seconds"])
        if theirs is not None:
            other_s.append(theirs["seconds"])
            pairs = zip((mine["outputs"][number] for number in order), theirs["outputs"], strict=True)
            agreements += [left[0] == right[0] for left, right in pairs]
    same = sum(agreements) / len(agreements) if agreements else 1.0
    return Comparison(workload, tuple(our_s), tuple(other_s), same)


def _run_other(
    other: Side | None, prompts: Sequence[Sequence[int]], order: Sequence[int], workload: Workload
) -> TrialAnswer | None:
    return None if other is None else other.run([prompts[number] for number in order], workload.max_tokens)
