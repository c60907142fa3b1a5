"""The least time that a GPU's memory and arithmetic allow."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from tests.benchmarks.gpu.gpu_workload import GpuWorkload
from tests.benchmarks.peers.model_cost import ModelCost

# An H200's as reached by a copy and a large product; its data sheet says 4.8e12 and 990e12.
H200_BYTES_PER_S = 4.3e12
H200_FLOP_PER_S = 790e12

FORMULA = """\
step     = max(W / bandwidth, 2 B P / matmul) + B C K / bandwidth
prefill  = max(W / bandwidth, FLOP / matmul); FLOP = 2 P_layers T + 2 P_head R + 4 L H D (pairs of a token and a key)
workload = prefill + its decode steps, every request running from the first; a shared prefix is computed once and read
           once a step
W: bytes of the weights that B tokens read, the head's included, of E experts the expected E (1 - (1 - k / E)^B);
P: weights a token passes through; C: mean context; K: bytes of KV a token, 2 L H_kv D times 2
bandwidth, matmul: the rates above (a copy's bytes read and written; a bfloat16 product's FLOP)"""


@dataclass(frozen=True)
class Limits:
    """Of one model at one pair of rates."""

    cost: ModelCost
    bytes_per_s: float = H200_BYTES_PER_S
    flop_per_s: float = H200_FLOP_PER_S
    itemsize: int = 2  # of weights and KV

    def weights_bytes(self, num_tokens: int) -> float:
        """That a step over so many tokens reads."""
        return self.cost.weights_read(num_tokens) * self.itemsize

    def kv_bytes(self, num_tokens: float) -> float:
        """Of so many tokens."""
        return self.cost.kv_elements_per_token * self.itemsize * num_tokens

    def decode_step_s(self, batch: int, kv_tokens: float) -> float:
        """One token each for `batch` sequences that hold `kv_tokens` together."""
        products = batch * (self.cost.layer_flop_per_token + self.cost.head.flop_per_token)
        weights_s = max(self.weights_bytes(batch) / self.bytes_per_s, products / self.flop_per_s)
        return weights_s + self.kv_bytes(kv_tokens) / self.bytes_per_s

    def prefill_s(self, own_tokens: Sequence[int], shared_tokens: int = 0) -> float:
        """Up to the first token of prompts that begin with the same `shared_tokens` and go on by themselves."""
        num_tokens = shared_tokens + sum(own_tokens)
        pairs = _triangle(shared_tokens) + sum(own * shared_tokens + _triangle(own) for own in own_tokens)
        flop = (
            num_tokens * self.cost.layer_flop_per_token
            + len(own_tokens) * self.cost.head.flop_per_token
            + pairs * self.cost.attention_flop_per_pair
        )
        return max(self.weights_bytes(num_tokens) / self.bytes_per_s, flop / self.flop_per_s)

    def workload_s(self, load: GpuWorkload) -> float:
        """From the prompts to the last token."""
        own = [len(prompt) - load.shared_tokens for prompt in load.prompts]
        total_s = self.prefill_s(own, load.shared_tokens)
        for step in range(1, max(load.max_tokens)):
            running = [tokens for tokens, limit in zip(own, load.max_tokens, strict=True) if limit > step]
            kv_tokens = load.shared_tokens + sum(running) + step * len(running)
            total_s += self.decode_step_s(len(running), kv_tokens)
        return total_s


def _triangle(count: int) -> int:
    return count * (count + 1) // 2
