"""What a product with a quantised weight is: each element on its own, in float32."""

from __future__ import annotations

import torch

from kernels.quantised import QuantisedWeight


def quantised_product(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """x [T, K] times a matrix [N, K] -> [T, N] in the dtype of x, rounded once.

    Integers of activations are those of the scheme; float8 ones are left in their dtype, as every CPU does.
    """
    wide = x.float()
    if weight.input_order is not None:
        wide = wide[:, weight.input_order]
    if weight.scheme.activations == "int8_token":
        wide = torch.stack([_rounded(row) for row in wide]) if len(wide) else wide
    return (wide @ dequantised(weight).T).to(x.dtype)


def _rounded(row: torch.Tensor) -> torch.Tensor:
    """A row [K] after rounding to 8 bits; a row of next to nothing is zeros."""
    largest = row.abs().max().clamp(min=1e-36)
    return (row * (127 / largest)).round() * (largest / 127)


def dequantised(weight: QuantisedWeight) -> torch.Tensor:
    """A matrix [N, K] in float32, its inputs in the order of `weight.values`."""
    scheme, (num_rows, width) = weight.scheme, weight.shape
    rows = torch.arange(num_rows) // (scheme.block_rows or num_rows)
    groups = torch.arange(width) // (scheme.group_size or width)
    values = weight.values.float()
    if scheme.bits == 4:
        byte = weight.values.long()
        values = torch.stack((byte % 16, byte // 16), dim=2).view(num_rows, width).float()
    zeros: torch.Tensor | float = 8.0 if scheme.bits == 4 else 0.0
    if weight.zero_points is not None:
        zeros = weight.zero_points.float()[rows][:, groups]
    return (values - zeros) * weight.scales.float()[rows][:, groups]
