"""The operations in their plainest form: float32 arithmetic, loops, one result rounded once.

No engine computes with it: tests and `millrace doctor` compare with it, and a checkpoint is verified without packing.

The module itself satisfies `kernels.interface.Operations`. Nothing is shared with the other implementations but the
types of the interface and the constants of `kernels.gumbel_noise`.
"""

from __future__ import annotations

from kernels.reference.layers import (
    add_experts_rms_norm,
    cap_logits,
    clamped_swiglu,
    combine_experts,
    fused_add_rms_norm,
    gelu_and_mul,
    grouped_gemm,
    linear,
    moe_small_batch,
    pack,
    paged_decode_attention,
    paged_prefill_attention,
    qk_norm_rope_store_kv,
    rms_norm,
    route_and_sort,
    route_topk,
    silu_and_mul,
    sort_tokens_by_expert,
    store_and_decode,
)
from kernels.reference.sampling import apply_penalties, choose_tokens
