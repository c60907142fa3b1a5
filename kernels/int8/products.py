"""Rounds weights and activations to 8 bits and multiplies them, in dense layers and in experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.cpu import dense
from kernels.cpu.experts import add_choices
from kernels.operands import ExpertLayout, PackedWeight, RoutedExperts

PARTS = 3  # of one matrix: integers in oneDNN's layout, scales [N] float32, zero points [N] int32 (all 0)

LARGEST = 127  # symmetric: -128 is not used, so that a row and its negative round alike
ZERO_POINT = 128  # oneDNN's products are fast for unsigned activations alone: 800 against 0.2 GOP/s for signed ones
# Rows are worked on in slabs of 1 MiB of float32, which stay in cache between the passes.
SLAB_ELEMENTS = 1 << 18
# With less, 127 / largest would overflow. Such a row becomes zeros: its products are next to nothing.
LEAST_LARGEST_VALUE = 1e-36


def pack(weight: torch.Tensor, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. Each output channel is rounded with the scale that makes its largest magnitude 127."""
    if keep_dtype:
        return dense.pack(weight)
    matrices = weight.unbind() if weight.dim() == 3 else (weight,)
    parts = [part for matrix in matrices for part in _quantise_matrix(matrix)]
    return PackedWeight(tuple(parts), tuple(weight.shape))


def is_quantised(weight: PackedWeight) -> bool:
    """Whether `pack` rounded it."""
    return weight.parts[0].dtype is torch.int8


def linear(x: torch.Tensor, weight: PackedWeight, *, gated: bool = False) -> torch.Tensor:
    """See `Operations.linear`."""
    if not is_quantised(weight):
        return dense.linear(x, weight, gated=gated)
    out = product(quantise_rows(x), weight, 0, x.dtype)
    return dense.silu_and_mul(out) if gated else out


def product(x: QuantisedRows, weight: PackedWeight, index: int, dtype: torch.dtype) -> torch.Tensor:
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


def _quantise_matrix(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = matrix.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=LEAST_LARGEST_VALUE) / LARGEST
    integers = (wide / scales).round_().to(torch.int8)
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(integers, [dense.ROWS_HINT, matrix.shape[1]])
    return packed, scales.flatten(), torch.zeros(matrix.shape[0], dtype=torch.int32)


def grouped_gemm(
    x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
) -> torch.Tensor:
    """See `Operations.grouped_gemm`. Tokens are rounded once, not once for each of their experts."""
    quantised = quantise_rows(x)
    if gather:
        quantised = quantised.select(layout.pair_ids // layout.top_k)
    parts = quantised.split(layout.run_lens)
    products = [product(part, weight, run.expert, x.dtype) for part, run in zip(parts, layout.runs, strict=True)]
    rows = torch.cat(products) if products else x.new_empty(0, weight.shape[1])
    return dense.silu_and_mul(rows) if gated else rows


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`."""
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
