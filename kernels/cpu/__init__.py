"""The operations in PyTorch on a CPU, written for speed. The module itself satisfies `kernels.interface.Operations`.

Measured on 2 cores with AVX512-BF16 and no AMX, torch 2.13: half precision has no fast matrix product here, so float16
is computed in float32; query heads that share a KV head are packed into the query length for attention (10 times faster
for one query); buffers past 32 MiB cost a page fault a page at every use (49 ms instead of 1 ms for a 67 MB gather), so
work is cut into pieces of a few MiB.
"""

from __future__ import annotations

from kernels.cpu.attention import paged_decode_attention, paged_prefill_attention, store_and_decode
from kernels.cpu.dense import (
    cap_logits,
    clamped_swiglu,
    fused_add_rms_norm,
    gelu_and_mul,
    qk_norm_rope_store_kv,
    rms_norm,
    silu_and_mul,
)
from kernels.cpu.experts import (
    add_experts_rms_norm,
    combine_experts,
    route_and_sort,
    route_topk,
    sort_tokens_by_expert,
)
from kernels.cpu.gumbel import choose_tokens
from kernels.cpu.quantised import grouped_gemm, linear, moe_small_batch, pack
from kernels.cpu.sampling import apply_penalties
