"""Matrix products with a weight of 8 bits."""

from __future__ import annotations

import torch

from kernels.cpu import projection as cpu
from kernels.int8.quantised_rows import LARGEST, LEAST_LARGEST_VALUE, ZERO_POINT, QuantisedRows, quantise_rows
from kernels.packed_weight import PackedWeight

PARTS = 3  # of one matrix: integers in oneDNN's layout, scales [N] float32, zero points [N] int32 (all 0)


def pack(weight: torch.Tensor, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. Each output channel is rounded with the scale that makes its largest magnitude 127."""
    if keep_dtype:
        return cpu.pack(weight)
    matrices = weight.unbind() if weight.dim() == 3 else (weight,)
    parts = [part for matrix in matrices for part in _quantised(matrix)]
    return PackedWeight(tuple(parts), tuple(weight.shape))


def is_quantised(weight: PackedWeight) -> bool:
    """Whether `pack` rounded it."""
    return weight.parts[0].dtype is torch.int8


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """See `Operations.linear`."""
    if not is_quantised(weight):
        return cpu.linear(x, weight)
    return product(quantise_rows(x), weight, 0, x.dtype)


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


def _quantised(matrix: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    wide = matrix.float()
    scales = wide.abs().amax(1, keepdim=True).clamp_(min=LEAST_LARGEST_VALUE) / LARGEST
    integers = (wide / scales).round_().to(torch.int8)
    packed: torch.Tensor = torch.ops.onednn.qlinear_prepack(integers, [cpu.ROWS_HINT, matrix.shape[1]])
    return packed, scales.flatten(), torch.zeros(matrix.shape[0], dtype=torch.int32)
