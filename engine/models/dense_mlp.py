"""The feed-forward part of a dense layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import Operations
from kernels.packed_weight import PackedWeight


@dataclass(frozen=True, eq=False)
class DenseMLP:
    """SwiGLU feed-forward (arXiv 2002.05202)."""

    ops: Operations
    gate_up_proj: PackedWeight  # [2I, H], gate first
    down_proj: PackedWeight  # [H, I]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        ops = self.ops
        return ops.linear(ops.silu_and_mul(ops.linear(x, self.gate_up_proj)), self.down_proj)
