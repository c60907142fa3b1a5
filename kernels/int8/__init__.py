"""The operations on a CPU with weights of 8 bits: those of `kernels.cpu`, with other matrix products.

The module itself satisfies `kernels.interface.Operations`. A weight is rounded once, when it is packed, to 8-bit
integers with one scale per output channel; a row of activations is rounded when it is multiplied, with a scale of its
own. The sums are integers and so exact: a row's result does not depend on its batch mates.
"""

from __future__ import annotations

from kernels.cpu import (
    apply_penalties,
    argmax,
    choose_tokens,
    combine_experts,
    fused_add_rms_norm,
    gumbel_argmax,
    mask_top_k_top_p_min_p,
    paged_decode_attention,
    paged_prefill_attention,
    qk_norm_rope_store_kv,
    rms_norm,
    route_and_sort,
    route_topk,
    silu_and_mul,
    sort_tokens_by_expert,
)
from kernels.int8.products import grouped_gemm, linear, moe_small_batch, pack
