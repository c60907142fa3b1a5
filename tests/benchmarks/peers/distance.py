"""Our time over the least that the machine allows."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median

from tests.benchmarks.peers.comparison import Comparison
from tests.benchmarks.peers.floor import Floor
from tests.benchmarks.peers.machine_rates import MachineRates
from tests.benchmarks.peers.model_cost import ModelCost


@dataclass(frozen=True)
class Distance:
    """Of one workload."""

    rates: MachineRates  # the best of before and after the trials
    floor: Floor
    times: float  # our median over the floor

    @classmethod
    def of(cls, comparison: Comparison, cost: ModelCost, rates: MachineRates, dtypes: tuple[str, str]) -> Distance:
        """`dtypes`: of our activations and KV, and of our weights."""
        floor = Floor.of(comparison.workload, cost, rates, dtypes)
        return cls(rates, floor, median(comparison.our_s) / floor.total_s)
