"""The operations in Triton, for CUDA tensors. The module itself satisfies `kernels.interface.Operations`."""

from __future__ import annotations

from kernels.triton.combine_experts import add_experts_rms_norm, combine_experts
from kernels.triton.decode_attention import paged_decode_attention, store_and_decode
from kernels.triton.dense import cap_logits, clamped_swiglu, fused_add_rms_norm, gelu_and_mul, rms_norm, silu_and_mul
from kernels.triton.experts import route_and_sort, route_topk, sort_tokens_by_expert
from kernels.triton.gumbel import choose_tokens
from kernels.triton.prefill_attention import paged_prefill_attention
from kernels.triton.quantised import grouped_gemm, linear, moe_small_batch, pack
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv
from kernels.triton.sampling import apply_penalties
