"""The operations on a CPU with a result that depends, bit for bit, on a row's own values alone.

The module itself satisfies `kernels.interface.Operations`. Operations of `kernels.cpu` that already treat each row
alone are taken from there. Products, attention and the activation are not: by the number of rows, libraries choose code
paths and PyTorch its cuts between threads. Bits may differ between numbers of threads, processors and versions of
PyTorch.
"""

from __future__ import annotations

from kernels.cpu import (
    add_experts_rms_norm,
    apply_penalties,
    choose_tokens,
    combine_experts,
    fused_add_rms_norm,
    qk_norm_rope_store_kv,
    rms_norm,
    sort_tokens_by_expert,
)
from kernels.deterministic.attention import paged_decode_attention, paged_prefill_attention, store_and_decode
from kernels.deterministic.products import (
    cap_logits,
    clamped_swiglu,
    gelu_and_mul,
    grouped_gemm,
    linear,
    moe_small_batch,
    pack,
    route_and_sort,
    route_topk,
    silu_and_mul,
)
