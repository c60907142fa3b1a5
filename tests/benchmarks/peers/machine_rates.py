"""What this CPU can do at best, in the shapes of a model."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch
from torch.nn.functional import linear

from tests.benchmarks.peers.model_cost import Product

NUM_ROWS = 512
ROUND_S = 0.3  # calls are repeated for as long: a second in all where a type is fast, some where it is emulated
READ_ELEMENTS = 1 << 27  # 512 MiB of float32: well beyond any cache

Call = Callable[[], object]


@dataclass(frozen=True)
class MachineRates:
    """Of the fastest calls. The rate of products is over all shapes of a model at NUM_ROWS rows, each in the fastest
    way that PyTorch has.
    """

    flop_per_s: Mapping[str, float]  # of those measured: float32, bfloat16, int8 (u8 activations)
    read_bytes_per_s: float

    @classmethod
    def measure(cls, products: Sequence[Product], num_threads: int, dtypes: Sequence[str]) -> MachineRates:
        """Takes a few seconds."""
        threads_before = torch.get_num_threads()
        torch.set_num_threads(num_threads)
        try:
            values = torch.ones(READ_ELEMENTS)
            read_s = min(_best_s(values.sum), _best_s(partial(torch.dot, values, values)))
            return cls({name: _rate(products, _CALLS[name]) for name in dtypes}, values.nbytes / read_s)
        finally:
            torch.set_num_threads(threads_before)

    def best_of(self, other: MachineRates) -> MachineRates:
        """The higher of each: what else ran here can only have lowered it."""
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
