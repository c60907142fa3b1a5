"""Trials of two sides in turn."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import NamedTuple, Protocol

from tests.benchmarks.cpu_ticks import CpuTicks
from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.machine_busy import MachineBusy
from tests.benchmarks.peers.servers.trial_loop import TrialAnswer
from tests.benchmarks.peers.workload import Workload

MAX_REPEATS = 4  # for each pair that is wanted


class Side(Protocol):
    """Runs a trial. `TrialServer` is one."""

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer: ...


class _Trial(NamedTuple):
    seconds: float
    first_tokens: list[int]  # by prompt, in the workload's order
    stolen: float


@dataclass(frozen=True)
class Trials:
    """How many, and under which conditions."""

    count: int
    is_sorted: bool = False  # the other side gets its prompts in order of their tokens
    max_stolen: float = 1.0  # share of the CPUs; a pair of which the hypervisor took more of a trial is run again
    read_ticks: Callable[[], CpuTicks] = CpuTicks.read

    def compare(self, workload: Workload, ours: Side, other: Side | None) -> Comparison:
        """A warm-up and the trials of both sides in turn, each with prompts of its own; which side is first alternates
        too. Raises MachineBusy where too few pairs were left alone.
        """
        pairs: list[tuple[_Trial, _Trial | None]] = []
        for number in range(1 + self.count * (1 + MAX_REPEATS)):
            pair = self._pair(workload, number, ours, other)
            if number > 0 and _stolen(pair) <= self.max_stolen:  # 0: the warm-up
                pairs.append(pair)
            if len(pairs) == self.count:
                return _comparison(workload, pairs, num_repeated=number - self.count)
        raise MachineBusy(self.max_stolen, len(pairs), self.count)

    def _pair(self, workload: Workload, number: int, ours: Side, other: Side | None) -> tuple[_Trial, _Trial | None]:
        prompts = workload.prompts(number)
        as_given = list(range(len(prompts)))
        order = sorted(as_given, key=prompts.__getitem__) if self.is_sorted else as_given
        if other is None:
            return self._run(ours, prompts, as_given, workload), None
        if number % 2 == 0:
            mine = self._run(ours, prompts, as_given, workload)
            return mine, self._run(other, prompts, order, workload)
        theirs = self._run(other, prompts, order, workload)
        return self._run(ours, prompts, as_given, workload), theirs

    def _run(self, side: Side, prompts: Sequence[list[int]], order: Sequence[int], workload: Workload) -> _Trial:
        before = self.read_ticks()
        answer = side.run([prompts[number] for number in order], workload.max_tokens)
        stolen = self.read_ticks().stolen_share(before)
        first_tokens = {number: output[0] for number, output in zip(order, answer["outputs"], strict=True)}
        return _Trial(answer["seconds"], [first_tokens[number] for number in range(len(prompts))], stolen)


def _stolen(pair: tuple[_Trial, _Trial | None]) -> float:
    return max(trial.stolen for trial in pair if trial is not None)


def _comparison(workload: Workload, pairs: Sequence[tuple[_Trial, _Trial | None]], *, num_repeated: int) -> Comparison:
    both = [(mine, theirs) for mine, theirs in pairs if theirs is not None]
    agreements = [
        left == right
        for mine, theirs in both
        for left, right in zip(mine.first_tokens, theirs.first_tokens, strict=True)
    ]
    return Comparison(
        workload,
        our_s=tuple(mine.seconds for mine, _ in pairs),
        other_s=tuple(theirs.seconds for _, theirs in both),
        stolen=tuple(map(_stolen, pairs)),
        num_repeated=num_repeated,
        same_first_token=sum(agreements) / len(agreements) if agreements else 1.0,
    )
