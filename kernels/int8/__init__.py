"""The operations on a CPU with weights rounded to 8 bits as they are packed: `kernels.cpu` with another `pack`.

The module itself satisfies `kernels.interface.Operations`. A weight gets one scale per output channel, a row of
activations one of its own when it is multiplied. The sums are integers and so exact: a row's result does not depend on
its batch mates.
"""

from __future__ import annotations

from kernels.cpu import (
    add_experts_rms_norm,
    apply_penalties,
    cap_logits,
    choose_tokens,
    clamped_swiglu,
    combine_experts,
    fused_add_rms_norm,
    gelu_and_mul,
    grouped_gemm,
    linear,
    moe_small_batch,
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
from kernels.cpu.quantised import round_and_pack as pack
