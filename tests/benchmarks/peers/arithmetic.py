"""How much arithmetic a workload is, at least, on a model."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from tests.benchmarks.peers.model_cost import ModelCost
from tests.benchmarks.peers.workload import Workload


class Flop(NamedTuple):
    """Multiplications and additions."""

    products: float  # with weights
    attention: float


@dataclass(frozen=True)
class Arithmetic:
    """Each shared prefix is computed once, the head only for tokens that are sampled."""

    workload: Workload
    cost: ModelCost

    def prefill(self) -> Flop:
        """Up to the first token of every request."""
        load, cost = self.workload, self.cost
        products = load.num_prefill_tokens * cost.layer_flop_per_token + load.num_requests * cost.head.flop_per_token
        own_pairs = load.own_tokens * load.prefix_tokens + _triangle(load.own_tokens)
        pairs = load.num_groups * _triangle(load.prefix_tokens) + load.num_requests * own_pairs
        return Flop(products, pairs * cost.attention_flop_per_pair)

    def decode_step(self, step: int) -> Flop:
        """One token of every request, `step` tokens behind its prompt (1 is the first)."""
        load, cost = self.workload, self.cost
        products = load.num_requests * (cost.layer_flop_per_token + cost.head.flop_per_token)
        return Flop(products, load.num_requests * (load.prompt_tokens + step) * cost.attention_flop_per_pair)

    def total(self) -> Flop:
        """From the prompts to the last tokens."""
        steps = [self.prefill(), *(self.decode_step(step) for step in range(1, self.workload.max_tokens))]
        return Flop(sum(step.products for step in steps), sum(step.attention for step in steps))


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
