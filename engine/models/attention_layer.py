"""Grouped-query attention over the paged KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.execution.forward_batch import ForwardBatch
from kernels.interface import Operations
from kernels.packed_weight import PackedWeight


@dataclass(frozen=True, eq=False)
class AttentionLayer:
    """Grouped-query attention (arXiv 2305.13245) over the paged KV cache; QK-norm where the family has it."""

    ops: Operations
    qkv_proj: PackedWeight  # [(Hq + 2 Hkv) * D, H]: queries, keys, values
    o_proj: PackedWeight  # [H, Hq * D]
    qk_norm: tuple[torch.Tensor, torch.Tensor, float] | None  # query weight [D], key weight [D], eps
    cos_sin: torch.Tensor  # [max_positions, D], float32, shared by all layers
    head_dim: int

    def forward(
        self, x: torch.Tensor, batch: ForwardBatch, k_cache: torch.Tensor, v_cache: torch.Tensor
    ) -> torch.Tensor:
        """x [T, H] -> [T, H]; writes this step's keys and values into the layer's caches."""
        ops = self.ops
        qkv = ops.linear(x, self.qkv_proj)
        q = ops.qk_norm_rope_store_kv(
            qkv, self.qk_norm, self.cos_sin, batch.positions, k_cache, v_cache, batch.slot_mapping
        )
        scale = self.head_dim**-0.5
        split = batch.num_decode_tokens
        parts: list[torch.Tensor] = []
        if batch.decode is not None:
            parts.append(ops.paged_decode_attention(q[:split], k_cache, v_cache, batch.decode, scale).output)
        if batch.prefill is not None:
            parts.append(ops.paged_prefill_attention(q[split:], k_cache, v_cache, batch.prefill, scale).output)
        attended = parts[0] if len(parts) == 1 else torch.cat(parts)
        return ops.linear(attended.reshape(attended.shape[0], -1), self.o_proj)
