"""One run of the comparison, workload by workload."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from pathlib import Path

from engine.loading.derived_settings import usable_cores
from tests.benchmarks.peers.checkpoints import checkpoint
from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.distance import Distance
from tests.benchmarks.peers.machine_rates import MachineRates
from tests.benchmarks.peers.model_cost import ModelCost
from tests.benchmarks.peers.peers import PEERS
from tests.benchmarks.peers.peers_machine import PeersMachine
from tests.benchmarks.peers.queue_side import QueueSide, queue_side
from tests.benchmarks.peers.trial_server import TrialServer, trial_server
from tests.benchmarks.peers.trials import Side, Trials
from tests.benchmarks.peers.workload import WORKLOADS, Workload
from tests.support.decoder_config import decoder_config

OUR_SERVER = "tests.benchmarks.peers.servers.millrace_server"


class PeersRun:
    """What was measured so far. A model is loaded once for all of its workloads."""

    def __init__(self, options: argparse.Namespace, cache: Path) -> None:
        self.machine = PeersMachine.read()
        self.sides: dict[str, dict[str, str]] = {}
        self.comparisons: list[Comparison] = []
        self.distances: dict[str, Distance] = {}
        self.command_s: dict[str, list[float]] = {}  # by workload: each trial's `submit --wait`, its start-up included
        self._options = options
        self._cache = cache

    def measure(self) -> Iterator[Comparison]:
        """Each workload as it is done. Raises PeerMissing, TrialServerFailed, MachineBusy."""
        for model in dict.fromkeys(WORKLOADS[name].model for name in self._options.workloads):
            path = checkpoint(model, self._cache)
            cost = ModelCost.of(decoder_config(path))
            with self._both_sides(path) as (ours, other):
                for workload in map(WORKLOADS.__getitem__, self._options.workloads):
                    if workload.model == model:
                        yield self._measure(workload, cost, ours, other)

    def _measure(self, workload: Workload, cost: ModelCost, ours: Side, other: Side | None) -> Comparison:
        options, products = self._options, (*cost.layers, cost.head)
        workload = workload.sized(options.requests, options.max_tokens)
        weights = options.dtype if options.quantization == "none" else options.quantization
        dtypes = tuple(dict.fromkeys(("float32", "bfloat16", weights)))
        before = MachineRates.measure(products, usable_cores(), dtypes)
        comparison = Trials(options.trials, options.sorted, options.max_stolen).compare(workload, ours, other)
        rates = before.best_of(MachineRates.measure(products, usable_cores(), dtypes))
        self.comparisons.append(comparison)
        if isinstance(ours, QueueSide):
            self.command_s[workload.name] = ours.command_s[-options.trials - comparison.num_repeated :]
        self.distances[workload.name] = Distance.of(comparison, cost, rates, (options.dtype, weights))
        return comparison

    @contextmanager
    def _both_sides(self, model: Path) -> Iterator[tuple[Side, Side | None]]:
        """Ours and the other, each in processes of its own. Through the queue the other is our engine without it."""
        options, assignments = self._options, self._assignments()
        command = [sys.executable, "-m", OUR_SERVER, str(model), *assignments]
        with ExitStack() as stack:
            engine = stack.enter_context(trial_server(command, {}, self._cache / "ours.log"))
            if options.through_queue:
                self.sides = {"ours": {"engine": "Millrace, through Redis and one worker"}, "other": engine.about}
                yield stack.enter_context(queue_side(model, assignments)), engine
                return
            peer = stack.enter_context(self._peer(model))
            self.sides = {"ours": engine.about, "other": {} if peer is None else peer.about}
            yield engine, peer

    def _peer(self, model: Path) -> AbstractContextManager[TrialServer | None]:
        options = self._options
        if options.peer is None:
            return nullcontext()
        peer = PEERS[options.peer]
        command = peer.command(options.venv, model, options.peer_dtype)
        return trial_server(command, peer.environment(options.venv), self._cache / f"{peer.name}.log")

    def _assignments(self) -> list[str]:
        options = self._options
        quantization = [] if options.quantization == "none" else [f"engine.quantization={options.quantization}"]
        threads = f"engine.num_threads={usable_cores()}"
        return [f"engine.dtype={options.dtype}", threads, *quantization, *options.set]
