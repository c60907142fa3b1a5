"""A product with a bias."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import Operations
from kernels.packed_weight import PackedWeight


@dataclass(frozen=True, eq=False)
class Affine:
    """`x @ weight.T + bias`."""

    ops: Operations
    weight: PackedWeight  # [N, K]
    bias: torch.Tensor  # [N]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return self.ops.linear(x, self.weight) + self.bias
