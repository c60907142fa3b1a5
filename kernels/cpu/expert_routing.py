"""Which experts a token goes to, and in which order the experts find their tokens."""

from __future__ import annotations

import torch

from kernels.expert_layout import ExpertLayout
from kernels.routed_experts import RoutedExperts


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`."""
    num_experts = router_logits.shape[1]
    probabilities = router_logits.softmax(-1, dtype=torch.float32)
    # torch.topk promises no order among equals. The bits of floats >= 0 order as integers do, so one integer holds the
    # probability and, below it, the expert's rank: no ties are left. (A stable sort takes four times as long.)
    rank = torch.arange(num_experts - 1, -1, -1)
    keys = probabilities.view(torch.int32).long().bitwise_left_shift_(32).bitwise_or_(rank)
    expert_ids = keys.topk(top_k, dim=-1).indices
    weights = probabilities.gather(1, expert_ids)
    poisoned = weights[:, :1].isnan()  # softmax makes all of a row NaN, or none of it
    if renormalise:
        weights /= weights.sum(-1, keepdim=True)
    if poisoned.any():
        expert_ids = torch.where(poisoned, torch.arange(top_k), expert_ids)
    return RoutedExperts(weights, expert_ids)


def sort_tokens_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    """See `Operations.sort_tokens_by_expert`.

    Raises ValueError for an expert id outside 0 .. num_experts - 1.
    """
    flat = expert_ids.flatten()
    counts = torch.bincount(flat, minlength=num_experts)
    if counts.shape[0] != num_experts:
        raise ValueError(f"expert_ids holds {counts.shape[0] - 1}; accepted: 0 to {num_experts - 1}")
    offsets = torch.zeros(num_experts + 1, dtype=torch.int64)
    torch.cumsum(counts, 0, out=offsets[1:])
    return ExpertLayout(flat.argsort(stable=True), offsets, expert_ids.shape[1])
