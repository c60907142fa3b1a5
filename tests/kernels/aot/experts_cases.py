"""Every launch of the expert operations at the shapes of Qwen3-30B-A3B, and at those of other expert layers."""

from __future__ import annotations

import torch

from kernels.expert_types import ExpertLayout, RoutedExperts
from kernels.triton.dense import pack
from kernels.triton.experts import combine_experts, route_topk, sort_tokens_by_expert
from kernels.triton.grouped_gemm import grouped_gemm
from kernels.triton.moe_small_batch import moe_small_batch

HIDDEN, INTERMEDIATE, EXPERTS, TOP_K = 2048, 768, 128, 8  # Qwen3-30B-A3B
# One number of tokens for each line of the H200 table; together they also reach each line of the derived rule.
TOKENS = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 256, 512, 1024, 1536, 4096)
# (experts, top_k, tokens) that take the derived rule on Hopper too: 16 rows narrow and wide, 32, 64, 128, grouped 128.
DERIVED = ((64, 6, 4), (64, 6, 80), (64, 6, 150), (64, 6, 300), (64, 6, 1000), (64, 6, 4000))


def _run_gemms(num_tokens: int, num_experts: int, top_k: int) -> None:
    layout = ExpertLayout(
        torch.empty(num_tokens * top_k, dtype=torch.int64), torch.empty(num_experts + 1, dtype=torch.int64), top_k
    )
    gate_up = torch.empty(num_experts, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device="meta")
    down = torch.empty(num_experts, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="meta")
    grouped_gemm(torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16), pack(gate_up), layout, gather=True)
    hidden = torch.empty(num_tokens * top_k, INTERMEDIATE, dtype=torch.bfloat16)
    grouped_gemm(hidden, pack(down), layout, gather=False)


def _run_others(num_tokens: int) -> None:
    for renormalise in (False, True):
        routed = route_topk(torch.empty(num_tokens, EXPERTS, dtype=torch.bfloat16), TOP_K, renormalise=renormalise)
    layout = sort_tokens_by_expert(routed.expert_ids, EXPERTS)
    rows = torch.empty(num_tokens * TOP_K, HIDDEN, dtype=torch.bfloat16)
    combine_experts(rows, layout, routed.weights)


def _run_short_cut(num_tokens: int) -> None:
    x = torch.empty(num_tokens, HIDDEN, dtype=torch.bfloat16)
    gate_up = torch.empty(EXPERTS, 2 * INTERMEDIATE, HIDDEN, dtype=torch.bfloat16, device="meta")
    down = torch.empty(EXPERTS, HIDDEN, INTERMEDIATE, dtype=torch.bfloat16, device="meta")
    expert_ids = torch.empty(num_tokens, TOP_K, dtype=torch.int64)
    moe_small_batch(x, pack(gate_up), pack(down), RoutedExperts(torch.empty(num_tokens, TOP_K), expert_ids))


def run_cases() -> None:
    """Call every operation in every configuration its launch can take; meant to run under `compiling_for`."""
    for num_tokens in TOKENS:
        _run_gemms(num_tokens, EXPERTS, TOP_K)
        _run_others(num_tokens)
    for num_experts, top_k, num_tokens in DERIVED:
        _run_gemms(num_tokens, num_experts, top_k)
    _run_short_cut(1)
