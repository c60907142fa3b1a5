"""Computes the least time that a workload can take on this machine.

It follows from the arithmetic and bytes that the model needs for a token, the arithmetic that the workload needs at
least, and what this CPU can do at best in the model's shapes.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch.nn.functional import linear

from engine.checkpoint.model_config import ModelConfig
from tests.benchmarks.peers.workload import Workload

FORMULA = """\
floor   = prefill + M - 1 decode steps, each the larger of its arithmetic and its reading:
          FLOP of products / rate + FLOP of attention / rate of the activations' type, and bytes / read bandwidth
prefill : 2 W T + 2 V H R + 4 L N D (pairs of a token and a key it sees) FLOP; T tokens, each shared prefix once;
          W weights that a token passes through; the head, and of the last layer all but keys and values, only for
          the R requests' last tokens. Bytes: weights, once
decode  : R (2 W + 2 V H) + 4 L N D (keys of all requests) FLOP a step. Bytes: weights (of experts those that R tokens
          choose) and 2 L N_kv D elements of KV a token, a shared prefix once per group
Norms, rotary, activations, sampling, writing to memory and scheduling count as nothing."""

BYTES = {"float32": 4, "bfloat16": 2, "int8": 1}

NUM_ROWS = 512
ROUND_S = 0.3  # calls are repeated for as long: a second in all where a type is fast, some where it is emulated
READ_ELEMENTS = 1 << 27  # 512 MiB of float32: well beyond any cache

Call = Callable[[], object]


class Flop(NamedTuple):
    """Numbers of multiplications and additions."""

    products: float  # with weights
    attention: float


@dataclass(frozen=True)
class Floor:
    """The least time of a workload, and what it follows from."""

    prefill_s: float
    decode_s: float
    flop: Flop
    decode_bytes: float

    @property
    def total_s(self) -> float:
        """Seconds of prefill and decode together."""
        return self.prefill_s + self.decode_s

    @classmethod
    def of(cls, workload: Workload, cost: ModelCost, rates: MachineRates, dtypes: tuple[str, str]) -> Floor:
        """The floor of a workload. `dtypes`: of activations and KV, then of weights (int8 or the same)."""
        dtype, weight_dtype = dtypes
        arithmetic = Arithmetic(workload, cost)

        def seconds(flop: Flop, num_bytes: float) -> float:
            products_s = flop.products / rates.flop_per_s[weight_dtype]
            attention_s = flop.attention / rates.flop_per_s[dtype]
            return max(products_s + attention_s, num_bytes / rates.read_bytes_per_s)

        weight_bytes = cost.weights_read(workload.num_requests) * BYTES[weight_dtype]
        prefill_bytes = cost.weights_read(workload.num_prefill_tokens) * BYTES[weight_dtype]
        decode_s = decode_bytes = 0.0
        for step in range(1, workload.max_tokens):
            keys = workload.num_groups * workload.prefix_tokens + workload.num_requests * (workload.own_tokens + step)
            num_bytes = weight_bytes + keys * cost.kv_elements_per_token * BYTES[dtype]
            decode_s += seconds(arithmetic.decode_step(step), num_bytes)
            decode_bytes += num_bytes
        return cls(seconds(arithmetic.prefill(), prefill_bytes), decode_s, arithmetic.total(), decode_bytes)


@dataclass(frozen=True)
class Product:
    """A weight [n, k] of which a model has `count`, and of which a token passes through `used`."""

    n: int
    k: int
    count: int
    used: int

    @property
    def flop_per_token(self) -> int:
        """FLOP of a token in all of these weights that it passes through."""
        return 2 * self.n * self.k * self.used


@dataclass(frozen=True)
class ModelCost:
    """The model's matrix products and attention; norms, activations and rotary are counted as free."""

    layers: tuple[Product, ...]  # of all layers
    head: Product
    attention_flop_per_pair: int  # of a query token and a key token, all layers: scores and weighted sum
    kv_elements_per_token: int  # all layers
    num_experts: int  # 0: dense
    experts_per_token: int
    num_layers: int = 1
    ending_flop_per_token: int = 0  # of the last layer's products behind its keys and values

    @classmethod
    def of(cls, config: ModelConfig) -> ModelCost:
        """The cost of the model that a checkpoint's config describes."""
        layers, hidden, head_dim = config.num_layers, config.hidden_size, config.head_dim
        attended = config.num_heads * head_dim
        products = [
            Product(attended + 2 * config.num_kv_heads * head_dim, hidden, layers, layers),
            Product(hidden, attended, layers, layers),
        ]
        moe = config.moe
        if moe is None:
            width, count, used = config.intermediate_size, layers, layers
        else:
            width, count, used = moe.intermediate_size, layers * moe.num_experts, layers * moe.experts_per_token
            products.append(Product(moe.num_experts, hidden, layers, layers))
        products += [Product(2 * width, hidden, count, used), Product(hidden, width, count, used)]
        return cls(
            layers=tuple(products),
            head=Product(config.vocab_size, hidden, 1, 1),
            attention_flop_per_pair=4 * attended * layers,
            num_layers=layers,
            ending_flop_per_token=sum(product.flop_per_token for product in products) // layers
            - 4 * config.num_kv_heads * head_dim * hidden,
            kv_elements_per_token=2 * config.num_kv_heads * head_dim * layers,
            num_experts=0 if moe is None else moe.num_experts,
            experts_per_token=0 if moe is None else moe.experts_per_token,
        )

    @property
    def layer_flop_per_token(self) -> int:
        """FLOP of a token in the products of all layers."""
        return sum(product.flop_per_token for product in self.layers)

    def weights_read(self, num_tokens: int) -> float:
        """Weights that a step over `num_tokens` tokens reads, the head's included.

        Of the experts it reads those that the tokens choose, if they choose evenly.
        """
        chosen = 1.0
        if self.num_experts:
            chosen -= (1 - self.experts_per_token / self.num_experts) ** num_tokens
        layers = sum(p.n * p.k * p.count * (chosen if p.count != p.used else 1.0) for p in self.layers)
        return layers + self.head.n * self.head.k


@dataclass(frozen=True)
class Arithmetic:
    """The least arithmetic of a workload: each shared prefix once, the head only for tokens that are sampled."""

    workload: Workload
    cost: ModelCost

    def prefill(self) -> Flop:
        """FLOP up to the first token of every request."""
        load, cost = self.workload, self.cost
        products = load.num_prefill_tokens * cost.layer_flop_per_token + load.num_requests * cost.head.flop_per_token
        products -= (load.num_prefill_tokens - load.num_requests) * cost.ending_flop_per_token
        own_pairs = load.own_tokens * load.prefix_tokens + _triangle(load.own_tokens)
        pairs = load.num_groups * _triangle(load.prefix_tokens) + load.num_requests * own_pairs
        ending_pairs = load.num_requests * load.prompt_tokens
        attention = ((cost.num_layers - 1) * pairs + ending_pairs) * cost.attention_flop_per_pair / cost.num_layers
        return Flop(products, attention)

    def decode_step(self, step: int) -> Flop:
        """FLOP of a step that gives every request a token, `step` tokens after its prompt (1 is the first)."""
        load, cost = self.workload, self.cost
        products = load.num_requests * (cost.layer_flop_per_token + cost.head.flop_per_token)
        return Flop(products, load.num_requests * (load.prompt_tokens + step) * cost.attention_flop_per_pair)

    def total(self) -> Flop:
        """FLOP from the prompts to the last tokens."""
        steps = [self.prefill(), *(self.decode_step(step) for step in range(1, self.workload.max_tokens))]
        return Flop(sum(step.products for step in steps), sum(step.attention for step in steps))


def _triangle(count: int) -> int:
    return count * (count + 1) // 2


@dataclass(frozen=True)
class MachineRates:
    """What this CPU does at best: products and reading, by the fastest calls.

    The rate of products is over all shapes of a model at NUM_ROWS rows, each in the fastest way that PyTorch has.
    """

    flop_per_s: Mapping[str, float]  # of those measured: float32, bfloat16, int8 (u8 activations)
    read_bytes_per_s: float

    @classmethod
    def measure(cls, products: Sequence[Product], num_threads: int, dtypes: Sequence[str]) -> MachineRates:
        """Measure the rates, in a few seconds."""
        threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            values = torch.ones(READ_ELEMENTS)
            read_s = min(_best_s(values.sum), _best_s(partial(torch.dot, values, values)))
            return cls({name: _rate(products, _CALLS[name]) for name in dtypes}, values.nbytes / read_s)
        finally:
            torch.set_num_threads(threads_before)

    def best_of(self, other: MachineRates) -> MachineRates:
        """The higher of each rate: other work on the machine can only have lowered it."""
        rates = {name: max(rate, other.flop_per_s[name]) for name, rate in self.flop_per_s.items()}
        return MachineRates(rates, max(self.read_bytes_per_s, other.read_bytes_per_s))


def _rate(products: Sequence[Product], calls: Callable[[Product], list[Call]]) -> float:
    """FLOP/s over all products, each as often as a token meets it."""
    seconds = sum(product.used * min(map(_best_s, calls(product))) for product in products)
    return NUM_ROWS * sum(product.flop_per_token for product in products) / seconds


def _best_s(call: Call) -> float:
    call()  # warms up
    best_s, began = float("inf"), time.perf_counter()
    while best_s == float("inf") or time.perf_counter() - began < ROUND_S:
        start = time.perf_counter()
        call()
        best_s = min(best_s, time.perf_counter() - start)
    return best_s


def _float_calls(dtype: torch.dtype, product: Product) -> list[Call]:
    x, weight = torch.randn(NUM_ROWS, product.k, dtype=dtype), torch.randn(product.n, product.k, dtype=dtype)
    packed = torch.ops.mkldnn._reorder_linear_weight(weight, NUM_ROWS)
    blocked = torch.ops.mkldnn._linear_pointwise
    return [partial(linear, x, weight), partial(blocked, x, packed, None, "none", [], "")]


def _int8_calls(product: Product) -> list[Call]:
    x = torch.randint(0, 255, (NUM_ROWS, product.k), dtype=torch.uint8)
    weight = torch.randint(-127, 127, (product.n, product.k), dtype=torch.int8)
    packed = torch.ops.onednn.qlinear_prepack(weight, [NUM_ROWS, product.k])
    scales, zeros = torch.ones(product.n), torch.zeros(product.n, dtype=torch.int32)
    call = torch.ops.onednn.qlinear_pointwise
    return [partial(call, x, 1.0, 128, packed, scales, zeros, None, 1.0, 0, torch.float32, "none", [], "")]


_CALLS: Mapping[str, Callable[[Product], list[Call]]] = {
    "float32": partial(_float_calls, torch.float32),
    "bfloat16": partial(_float_calls, torch.bfloat16),
    "int8": _int8_calls,
}
