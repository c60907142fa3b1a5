"""The classification head, which encoders and decoders have in common: a pooled hidden state to logits of classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray

from engine.checkpoint.classifier_config import ClassActivation
from kernels.interface import Operations
from kernels.operands import PackedWeight

Elementwise = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True, eq=False)
class ClassificationHead:
    """Logits of C classes, in float32 whatever the model's dtype: one row a text costs nothing, and rounding is seen.

    Encoders put a dense layer and an activation before the classes (BERT's is tanh, and it calls them the pooler),
    ModernBERT a norm behind these; decoders have none, and no bias.
    """

    ops: Operations
    classes: PackedWeight  # [C, H], float32
    bias: torch.Tensor | None = None  # [C], float32
    dense: tuple[PackedWeight, torch.Tensor | None] | None = None  # [H, H] and [H], float32
    activation: Elementwise = torch.tanh  # behind the dense layer
    norm: Elementwise | None = None  # behind that: [n, H] -> [n, H]

    def logits(self, pooled: torch.Tensor) -> torch.Tensor:
        """pooled [n, H] float32 -> [n, C] float32; NaN where a row of `pooled` is not finite."""
        is_finite = torch.isfinite(pooled).all(dim=1, keepdim=True)  # tanh makes 1 of infinity
        x = pooled
        if self.dense is not None:
            weight, bias = self.dense
            x = self.ops.linear(x, weight)
            x = self.activation(x if bias is None else x + bias)
        if self.norm is not None:
            x = self.norm(x)
        out = self.ops.linear(x, self.classes)
        if self.bias is not None:
            out = out + self.bias
        return torch.where(is_finite, out, torch.nan)


def activated(logits: NDArray[np.float32], activation: ClassActivation) -> NDArray[np.float32]:
    """The scores of classes from their logits [C]. In float64, where no exponential overflows."""
    exact = logits.astype(np.float64)
    if activation == "sigmoid":
        exact = np.exp(-np.logaddexp(0.0, -exact))
    elif activation == "softmax":
        powers = np.exp(exact - exact.max())
        exact = powers / powers.sum()
    return exact.astype(np.float32)
