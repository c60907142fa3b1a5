"""Runs trials of two sides in turn, workload by workload, and compares the times with each other and with the floor."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from statistics import median
from typing import NamedTuple, Protocol

from engine.loading.derived_settings import usable_cores
from tests.benchmarks.machine import CpuTicks, PeersMachine
from tests.benchmarks.peers.floor import Floor, MachineRates, ModelCost
from tests.benchmarks.peers.servers import TrialAnswer
from tests.benchmarks.peers.sides import PEERS, SERVERS, QueueSide, TrialServer, queue_side, trial_server
from tests.benchmarks.peers.workload import WORKLOADS, Workload, checkpoint, quantised
from tests.support.tiny_checkpoint import decoder_config

MAX_REPEATS = 4  # for each pair that is wanted
LEAST_MODEL_LEN = 2048  # tokens that a request may have: of both sides, so that no run is sized for its workload alone


class Side(Protocol):
    """What runs a trial, such as a `TrialServer`."""

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer: ...


class _Trial(NamedTuple):
    seconds: float
    first_tokens: list[int]  # by prompt, in the workload's order
    stolen: float


@dataclass(frozen=True)
class Trials:
    """How many trials are run, and which of them count."""

    count: int
    is_sorted: bool = False  # the other side gets its prompts in order of their tokens
    max_stolen: float = 1.0  # share of the CPUs; a pair of which the hypervisor took more of a trial is run again
    read_ticks: Callable[[], CpuTicks] = CpuTicks.read

    def compare(self, workload: Workload, ours: Side, other: Side | None) -> Comparison:
        """Run a warm-up, then trials of both sides in turn. Each pair has its own prompts; who is first alternates.

        Raises MachineBusy if the hypervisor took too much in too many pairs.
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


@dataclass(frozen=True)
class Comparison:
    """The seconds of each trial of both sides. Trials of the same number had the same prompts."""

    workload: Workload
    our_s: tuple[float, ...]
    other_s: tuple[float, ...]  # empty: only ours was measured
    stolen: tuple[float, ...]  # share of the CPUs that the hypervisor took, of each pair the trial that suffered more
    num_repeated: int  # pairs that did not count, because it took too much
    same_first_token: float  # share of the requests whose first token both chose; 1.0 where only ours was measured

    @property
    def ratios(self) -> tuple[float, ...]:
        """Our time / the other's, trial by trial; below 1 we are faster."""
        return tuple(ours / other for ours, other in zip(self.our_s, self.other_s, strict=bool(self.other_s)))

    @property
    def ratio(self) -> float | None:
        """Median of the ratios; None if only ours was measured."""
        return median(self.ratios) if self.other_s else None


@dataclass(frozen=True)
class Distance:
    """How far our time of a workload is from the least that the machine allows."""

    rates: MachineRates  # the best of before and after the trials
    floor: Floor
    times: float  # our median over the floor

    @classmethod
    def of(cls, comparison: Comparison, cost: ModelCost, rates: MachineRates, dtypes: tuple[str, str]) -> Distance:
        """The distance of our times. `dtypes`: of our activations and KV, then of our weights."""
        floor = Floor.of(comparison.workload, cost, rates, dtypes)
        return cls(rates, floor, median(comparison.our_s) / floor.total_s)


class MachineBusy(RuntimeError):
    """Too few pairs of trials in which the hypervisor took little."""

    def __init__(self, max_stolen: float, num_pairs: int, wanted: int) -> None:
        """max_stolen: share of the CPUs, 0 to 1."""
        super().__init__(
            f"--max-stolen {max_stolen:g}: {num_pairs} pairs of trials in which the hypervisor took no larger share of "
            f"the CPUs, {wanted} wanted; later, or with a larger share"
        )


class PeersRun:
    """Measures all workloads and keeps the figures. A model is loaded once for all of its workloads."""

    def __init__(self, options: argparse.Namespace, cache: Path) -> None:
        self.machine = PeersMachine.read()
        self.sides: dict[str, dict[str, str]] = {}
        self.comparisons: list[Comparison] = []
        self.distances: dict[str, Distance] = {}
        self.command_s: dict[str, list[float]] = {}  # by workload: each trial's `submit --wait`, its start-up included
        self._options = options
        self._cache = cache

    def measure(self) -> Iterator[Comparison]:
        """Yield each workload as it is done. Raises PeerMissing, TrialServerFailed, MachineBusy."""
        for model in dict.fromkeys(WORKLOADS[name].model for name in self._options.workloads):
            path = checkpoint(model, self._cache)
            cost = ModelCost.of(decoder_config(path))
            with self._both_sides(path) as (ours, other):
                for workload in map(WORKLOADS.__getitem__, self._options.workloads):
                    if workload.model == model:
                        yield self._measure(workload, cost, ours, other)

    def _measure(self, workload: Workload, cost: ModelCost, ours: Side, other: Side | None) -> Comparison:
        options, products = self._options, (*cost.layers, cost.head)
        workload = workload.sized(options.requests, options.max_tokens, options.prompt_tokens)
        weights = options.dtype if options.quantization == "none" else options.quantization
        dtypes = tuple(dict.fromkeys(("float32", "bfloat16", weights)))
        before = MachineRates.measure(products, usable_cores(), dtypes)
        comparison = Trials(options.trials, options.sorted, options.max_stolen).compare(workload, ours, other)
        rates = before.best_of(MachineRates.measure(products, usable_cores(), dtypes))
        self.comparisons.append(comparison)
        if isinstance(ours, QueueSide):
            self.command_s[workload.name] = ours.command_s[-options.trials - comparison.num_repeated :]
        if options.scheme == "none":  # the floor knows no bytes and rates of the others
            self.distances[workload.name] = Distance.of(comparison, cost, rates, (options.dtype, weights))
        return comparison

    @contextmanager
    def _both_sides(self, model: Path) -> Iterator[tuple[Side, Side | None]]:
        """Start our side and the other, in processes of their own. Through the queue, the other is our engine alone."""
        options, assignments = self._options, self._assignments()
        plain, model = model, model if options.scheme == "none" else quantised(model, options.scheme)
        with ExitStack() as stack:
            engine = stack.enter_context(self._engine(model, assignments, "ours.log"))
            if options.through_queue:
                self.sides = {"ours": {"engine": "Millrace, through Redis and one worker"}, "other": engine.about}
                yield stack.enter_context(queue_side(model, assignments)), engine
                return
            if options.unquantised:
                other = stack.enter_context(self._engine(plain, assignments, "unquantised.log"))
                self.sides = {"ours": engine.about | {"scheme": options.scheme}, "other": other.about}
                yield engine, other
                return
            peer = stack.enter_context(self._peer(model))
            self.sides = {"ours": engine.about, "other": {} if peer is None else peer.about}
            yield engine, peer

    def _engine(self, model: Path, assignments: Sequence[str], log: str) -> AbstractContextManager[TrialServer]:
        return trial_server(
            [sys.executable, "-m", SERVERS, "millrace", str(model), *assignments], {}, self._cache / log
        )

    def _peer(self, model: Path) -> AbstractContextManager[TrialServer | None]:
        options = self._options
        if options.peer is None:
            return nullcontext()
        peer = PEERS[options.peer]
        command = peer.command(options.venv, model, options.peer_dtype, options.requests, self._max_model_len)
        return trial_server(command, peer.environment(options.venv), self._cache / f"{peer.name}.log")

    def _assignments(self) -> list[str]:
        options = self._options
        quantization = [] if options.quantization == "none" else [f"engine.quantization={options.quantization}"]
        threads = f"engine.num_threads={usable_cores()}"
        limits = [f"engine.max_num_seqs={options.requests}", f"engine.max_model_len={self._max_model_len}"]
        return [f"engine.dtype={options.dtype}", threads, *limits, *quantization, *options.set]

    @property
    def _max_model_len(self) -> int:
        prompt_tokens: int = self._options.prompt_tokens
        return max(LEAST_MODEL_LEN, prompt_tokens + int(self._options.max_tokens))
