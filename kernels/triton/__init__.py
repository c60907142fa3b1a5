"""The operations in Triton, for CUDA tensors. The module itself satisfies `kernels.interface.Operations`."""

from __future__ import annotations

from kernels.triton.activation import silu_and_mul
from kernels.triton.attention_merge import merge_attention_states
from kernels.triton.decode_attention import paged_decode_attention
from kernels.triton.expert_combine import combine_experts
from kernels.triton.expert_routing import route_topk
from kernels.triton.expert_sort import sort_tokens_by_expert
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.gumbel import gumbel_argmax
from kernels.triton.moe_small_batch import moe_small_batch
from kernels.triton.normalisation import fused_add_rms_norm, rms_norm
from kernels.triton.penalties import apply_penalties
from kernels.triton.prefill_attention import paged_prefill_attention
from kernels.triton.projection import linear, pack
from kernels.triton.rope_kv_store import qk_norm_rope_store_kv
from kernels.triton.selection import argmax
from kernels.triton.truncation import mask_top_k_top_p_min_p

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
