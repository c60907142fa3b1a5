"""Matrix products with a weight."""

from __future__ import annotations

import torch

from kernels.packed_weight import PackedWeight


def pack(weight: torch.Tensor, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. The tensor itself, whose dtype is kept either way."""
    return PackedWeight.unchanged(weight)


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """`x @ weight.T`."""
    return product(x, weight.tensor)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]."""
    return (x.float() @ weight.float().T).to(x.dtype)
