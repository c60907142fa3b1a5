"""Which experts a token goes to."""

from __future__ import annotations

import torch

from kernels.cpu import expert_routing as cpu
from kernels.routed_experts import RoutedExperts


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. The weights are added up in the order of the choices.

    PyTorch's sum over a few columns may go along rows or along columns, as the number of rows has it.
    """
    weights, expert_ids = cpu.route_topk(router_logits, top_k, renormalise=False)
    if renormalise:
        total = weights[:, :1].clone()
        for choice in range(1, top_k):
            total += weights[:, choice : choice + 1]
        weights = weights / total
    return RoutedExperts(weights, expert_ids)
