"""Which experts a token goes to."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.routed_experts import RoutedExperts
from kernels.triton.moe_launch import power_of_two_from


@triton.jit
def _route_topk_kernel(
    logits_ptr,  # [T, E], model dtype
    weights_ptr,  # [T, TOP_K], float32
    expert_ids_ptr,  # [T, TOP_K], int64
    num_experts,
    stride_logits_token,
    stride_logits_expert,
    TOP_K: tl.constexpr,
    RENORMALISE: tl.constexpr,
    BLOCK_E: tl.constexpr,
    BLOCK_CHOICES: tl.constexpr,
):
    """Softmax over the experts of one token, then TOP_K times the largest that is left.

    Grid: (T,)
    """
    token = tl.program_id(0).to(tl.int64)
    experts = tl.arange(0, BLOCK_E)
    is_expert = experts < num_experts
    logits = tl.load(
        logits_ptr + token * stride_logits_token + experts * stride_logits_expert, mask=is_expert, other=-float("inf")
    ).to(tl.float32)
    exponentials = tl.exp(logits - tl.max(logits, 0))
    total = tl.sum(exponentials, 0)
    is_sound = total >= 1.0  # the largest adds exp(0); a NaN or an infinity makes the total NaN, which is not >= 1

    # The bits of floats >= 0 order as integers do, so one integer holds the probability and, below it, the expert's
    # rank: a single maximum finds the expert, and of equal probabilities the lower id.
    bits = (exponentials / total).to(tl.int32, bitcast=True).to(tl.int64)
    keys = tl.where(is_expert, (bits << 32) | (BLOCK_E - 1 - experts), -1)
    choices = tl.arange(0, BLOCK_CHOICES)
    weights = tl.zeros([BLOCK_CHOICES], dtype=tl.float32)
    expert_ids = tl.zeros([BLOCK_CHOICES], dtype=tl.int64)
    for choice in tl.static_range(TOP_K):
        best = tl.max(keys, 0)
        keys = tl.where(keys == best, -1, keys)
        weights = tl.where(choices == choice, (best >> 32).to(tl.int32).to(tl.float32, bitcast=True), weights)
        expert_ids = tl.where(choices == choice, BLOCK_E - 1 - (best & 0xFFFFFFFF), expert_ids)
    if RENORMALISE:
        weights /= tl.sum(weights, 0)
    weights = tl.where(is_sound, weights, float("nan"))
    expert_ids = tl.where(is_sound, expert_ids, choices)
    is_choice = choices < TOP_K
    tl.store(weights_ptr + token * TOP_K + choices, weights, mask=is_choice)
    tl.store(expert_ids_ptr + token * TOP_K + choices, expert_ids, mask=is_choice)


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. One token a program, one warp: a warp's reductions need no barrier."""
    num_tokens, num_experts = router_logits.shape
    weights = torch.empty(num_tokens, top_k, dtype=torch.float32, device=router_logits.device)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64, device=router_logits.device)
    if num_tokens:
        _route_topk_kernel[(num_tokens,)](
            router_logits,
            weights,
            expert_ids,
            num_experts,
            router_logits.stride(0),
            router_logits.stride(1),
            TOP_K=top_k,
            RENORMALISE=renormalise,
            BLOCK_E=power_of_two_from(num_experts),
            BLOCK_CHOICES=power_of_two_from(top_k),
            num_warps=1,
        )
    return RoutedExperts(weights, expert_ids)
