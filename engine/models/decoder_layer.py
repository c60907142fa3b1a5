"""One transformer layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.execution.forward_batch import ForwardBatch
from engine.models.attention_layer import AttentionLayer
from engine.models.dense_mlp import DenseMLP
from engine.models.moe_mlp import MoeMLP
from kernels.interface import Operations


@dataclass(frozen=True, eq=False)
class DecoderLayer:
    """Pre-norm attention and feed-forward, the residual stream kept in place."""

    ops: Operations
    input_norm: torch.Tensor  # [H]
    attention: AttentionLayer
    post_attention_norm: torch.Tensor  # [H]
    mlp: DenseMLP | MoeMLP
    eps: float

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor,
        batch: ForwardBatch,
        k_cache: torch.Tensor,
        v_cache: torch.Tensor,
    ) -> torch.Tensor:
        """x [T, H], the previous layer's output, is added to residual [T, H] in place; returns this layer's output."""
        normed = self.ops.fused_add_rms_norm(x, residual, self.input_norm, self.eps)
        attended = self.attention.forward(normed, batch, k_cache, v_cache)
        normed = self.ops.fused_add_rms_norm(attended, residual, self.post_attention_norm, self.eps)
        return self.mlp.forward(normed)
