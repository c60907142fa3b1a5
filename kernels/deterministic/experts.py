"""Routing, and the matrix products of a mixture-of-experts layer, each expert's rows in the tiles of `linear`."""

from __future__ import annotations

import torch

from kernels.cpu import experts
from kernels.deterministic.dense import product
from kernels.operands import ExpertLayout, PackedWeight, RoutedExperts


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. The weights are added up in the order of the choices.

    PyTorch sums a few columns along rows or along columns, depending on the number of rows.
    """
    weights, expert_ids = experts.route_topk(router_logits, top_k, renormalise=False)
    if renormalise:
        total = weights[:, :1].clone()
        for choice in range(1, top_k):
            total += weights[:, choice : choice + 1]
        weights = weights / total
    return RoutedExperts(weights, expert_ids)


def grouped_gemm(x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`."""
    rows = experts.products_by_expert(x, weight.matrices, layout, product, gather=gather)
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[1])


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`. With the bits of the sorted way: which one is taken only matters for speed."""
    return experts.products_by_pair(x, gate_up.matrices, down.matrices, routed, product)
