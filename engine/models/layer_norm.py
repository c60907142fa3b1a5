"""Layer normalisation."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class LayerNorm:
    """Over the last dimension, with weight and bias (arXiv 1607.06450)."""

    weight: torch.Tensor  # [H]
    bias: torch.Tensor  # [H]
    eps: float

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        return torch.nn.functional.layer_norm(x, self.weight.shape, self.weight, self.bias, self.eps)
