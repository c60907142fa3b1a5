"""The feed-forward part of a mixture-of-experts layer."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import Operations
from kernels.packed_weight import PackedWeight


@dataclass(frozen=True, eq=False)
class MoeMLP:
    """Routed SwiGLU experts (Qwen3-MoE): softmax over all experts, the top k of them, weights renormalised if asked."""

    ops: Operations
    router: PackedWeight  # [E, H]
    gate_up_proj: PackedWeight  # [E, 2I, H]
    down_proj: PackedWeight  # [E, H, I]
    top_k: int
    renormalise: bool
    bucketed_min_tokens: int | None  # from so many tokens on, sort by expert and run one GEMM each; None: never

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, H] -> [T, H]."""
        ops = self.ops
        routed = ops.route_topk(ops.linear(x, self.router), self.top_k, renormalise=self.renormalise)
        if self.bucketed_min_tokens is None or x.shape[0] < self.bucketed_min_tokens:
            return ops.moe_small_batch(x, self.gate_up_proj, self.down_proj, routed)
        layout = ops.sort_tokens_by_expert(routed.expert_ids, self.router.shape[0])
        hidden = ops.silu_and_mul(ops.grouped_gemm(x, self.gate_up_proj, layout, gather=True))
        rows = ops.grouped_gemm(hidden, self.down_proj, layout, gather=False)
        return ops.combine_experts(rows, layout, routed.weights)
