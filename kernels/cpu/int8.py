"""Products of 8-bit weights with activations that are rounded to 8 bits as well, in dense layers and in experts.

A row of activations is rounded when it is multiplied, with a scale of its own. The sums are integers and so exact: a
row's result does not depend on its batch mates.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.cpu import dense
from kernels.cpu.experts import add_choices
from kernels.operands import ExpertLayout, PackedWeight, RoutedExperts
from kernels.quantised import LARGEST_INT8 as LARGEST
from kernels.quantised import LEAST_LARGEST_VALUE, QuantisedWeight

PARTS = 3  # of one matrix: integers in oneDNN's layout, scales [N] float32, zero points [N] int32 (all 0)

ZERO_POINT = 128  # oneDNN's products are fast for unsigned activations alone: 800 against 0.2 GOP/s for signed ones
# Rows are worked on in slabs of 1 MiB of float32, which stay in cache between the passes.
SLAB_ELEMENTS = 1 << 18


@dataclass(frozen=True, eq=False)
class PackedInt8(PackedWeight):
    """Integers in oneDNN's layout, PARTS parts for each matrix."""


def is_fast() -> bool:
    """Whether oneDNN multiplies 8 bits fast and exactly here: with AVX-512 VNNI.

    Without, it adds pairs of 8-bit products in 16 bits, which saturate, or has only a path of a thousandth of the
    speed.
    """
    return bool(torch.cpu._is_vnni_supported())


def is_multiplied(weight: QuantisedWeight) -> bool:
    """Whether `pack` takes the weight, and its products are fast here."""
    scheme = weight.scheme
    is_plain = scheme.bits == 8 and not scheme.is_float and scheme.symmetric and weight.input_order is None
    is_channelwise = scheme.block_rows == 1 and weight.scales.shape[-1] == 1
    return scheme.activations == "int8_token" and is_plain and is_channelwise and is_fast()


def pack(weight: QuantisedWeight) -> PackedInt8:
    """A weight of integers with one scale a channel, no zero points and its inputs in order, in oneDNN's layout."""
    parts: list[torch.Tensor] = []
    for matrix in weight.matrices:
        num_rows, width = matrix.shape
        packed = torch.ops.onednn.qlinear_prepack(matrix.values, [dense.ROWS_HINT, width])
        parts += (packed, matrix.scales.float().flatten(), torch.zeros(num_rows, dtype=torch.int32))
    return PackedInt8(tuple(parts), weight.shape)


def linear(x: torch.Tensor, weight: PackedInt8) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]."""
    return product(quantise_rows(x), weight, 0, x.dtype)


def product(x: QuantisedRows, weight: PackedInt8, index: int, dtype: torch.dtype) -> torch.Tensor:
    """Rows [T, K] times the index-th matrix of a quantised weight -> [T, N] in dtype, rounded to it once.

    The integer sums are exact up to a depth of 66,000.
    """
    matrix, scales, zero_points = weight.parts[PARTS * index : PARTS * index + PARTS]
    out: torch.Tensor = torch.ops.onednn.qlinear_pointwise.default(
        *(x.values, 1.0, ZERO_POINT),
        *(matrix, scales, zero_points),
        None,
        *(1.0, 0, torch.float32),
        *("none", [], ""),
    )
    if dtype is torch.float32:
        return out.mul_(x.scales)
    return torch.mul(out, x.scales, out=torch.empty(out.shape, dtype=dtype))


def grouped_gemm(x: torch.Tensor, weight: PackedInt8, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`. Tokens are rounded once, not once for each of their experts."""
    quantised = quantise_rows(x)
    if gather:
        quantised = quantised.select(layout.pair_ids // layout.top_k)
    parts = quantised.split(layout.run_lens)
    products = [product(part, weight, run.expert, x.dtype) for part, run in zip(parts, layout.runs, strict=True)]
    return torch.cat(products) if products else x.new_empty(0, weight.shape[1])


def moe_small_batch(x: torch.Tensor, gate_up: PackedInt8, down: PackedInt8, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`. A token is rounded once for all of its experts."""
    outputs = []
    for token, experts in enumerate(routed.expert_ids.tolist()):
        row = quantise_rows(x[token : token + 1])
        for expert in experts:
            hidden = dense.silu_and_mul(product(row, gate_up, expert, x.dtype))
            outputs.append(product(quantise_rows(hidden), down, expert, x.dtype))
    return add_choices(outputs, routed, x)


class QuantisedRows(NamedTuple):
    """Row i is `(values[i] - ZERO_POINT) * scales[i]`."""

    values: torch.Tensor  # [T, K], uint8, 1 to 255
    scales: torch.Tensor  # [T, 1], float32

    def split(self, counts: list[int]) -> list[QuantisedRows]:
        """Runs of neighbouring rows of these lengths, not copied."""
        parts = zip(torch.split(self.values, counts), torch.split(self.scales, counts), strict=True)
        return [QuantisedRows(values, scales) for values, scales in parts]

    def select(self, rows: torch.Tensor) -> QuantisedRows:
        """The rows of these indices [n] int64."""
        return QuantisedRows(self.values.index_select(0, rows), self.scales.index_select(0, rows))


def quantise_rows(x: torch.Tensor) -> QuantisedRows:
    """x [T, K] of a floating dtype -> its rows, each with the scale that makes its largest magnitude 127.

    Rounded half to even. A row with a value that is not finite gets a scale that is not, and so shows in its products.
    """
    values = torch.empty(x.shape, dtype=torch.uint8)
    scales = torch.empty(x.shape[0], 1)
    step = max(SLAB_ELEMENTS // max(x.shape[1], 1), 1)
    for start in range(0, x.shape[0], step):
        slab = slice(start, start + step)
        rows = x[slab].float()
        largest = rows.abs().amax(1, keepdim=True).clamp_(min=LEAST_LARGEST_VALUE)
        rounded = torch.mul(rows, LARGEST / largest).round_()
        # To int8 and from there by the sign bit: float32 to uint8 is not vectorised (0.11 against 0.03 ms, 64 x 3072).
        values[slab] = rounded.to(torch.int8).bitwise_xor_(-ZERO_POINT).view(torch.uint8)
        torch.mul(largest, 1 / LARGEST, out=scales[slab])
    return QuantisedRows(values, scales)
