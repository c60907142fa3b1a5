"""The operations in their plainest form: float32 arithmetic, loops, one result rounded once.

No engine computes with this: tests and `millrace doctor` compare with it, and a checkpoint is checked without packing.

The module itself satisfies `kernels.interface.Operations`. Nothing is shared with the other implementations but the
types of the interface and the constants of `kernels.gumbel_noise`.
"""

from __future__ import annotations

from kernels.reference.activation import silu_and_mul
from kernels.reference.attention import (
    merge_attention_states,
    paged_decode_attention,
    paged_prefill_attention,
)
from kernels.reference.experts import (
    combine_experts,
    grouped_gemm,
    moe_small_batch,
    route_topk,
    sort_tokens_by_expert,
)
from kernels.reference.gumbel import gumbel_argmax
from kernels.reference.normalisation import fused_add_rms_norm, rms_norm
from kernels.reference.projection import linear, pack
from kernels.reference.rope_kv_store import qk_norm_rope_store_kv
from kernels.reference.sampling import apply_penalties, argmax, mask_top_k_top_p_min_p

__all__ = [
    "pack",
    "linear",
    "rms_norm",
    "fused_add_rms_norm",
    "silu_and_mul",
    "qk_norm_rope_store_kv",
    "paged_decode_attention",
    "paged_prefill_attention",
    "merge_attention_states",
    "route_topk",
    "sort_tokens_by_expert",
    "grouped_gemm",
    "moe_small_batch",
    "combine_experts",
    "argmax",
    "apply_penalties",
    "mask_top_k_top_p_min_p",
    "gumbel_argmax",
]
