"""The matrix products of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise

import torch

from kernels.cpu.activation import silu_and_mul
from kernels.cpu.projection import linear_into
from kernels.expert_layout import ExpertLayout
from kernels.routed_experts import RoutedExperts

# x [T, K], weight [N, K], out [T, N] -> out, written.
ProductInto = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]


def grouped_gemm(x: torch.Tensor, weight: torch.Tensor, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`."""
    return products_by_expert(x, weight, layout, linear_into, gather=gather)


def moe_small_batch(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`."""
    return products_by_pair(x, gate_up, down, routed, linear_into)


def products_by_expert(
    x: torch.Tensor, weight: torch.Tensor, layout: ExpertLayout, product_into: ProductInto, *, gather: bool
) -> torch.Tensor:
    """`grouped_gemm`: one product per expert that has rows, into one buffer."""
    out = x.new_empty(layout.pair_ids.shape[0], weight.shape[1])
    tokens = layout.pair_ids // layout.top_k if gather else None
    offsets = layout.expert_offsets.tolist()
    for expert, (start, end) in enumerate(pairwise(offsets)):
        if start < end:
            # Gathered expert by expert: all rows at once would be top_k times the size of x.
            rows = x[start:end] if tokens is None else x.index_select(0, tokens[start:end])
            product_into(rows, weight[expert], out[start:end])
    return out


def products_by_pair(
    x: torch.Tensor,
    gate_up: torch.Tensor,
    down: torch.Tensor,
    routed: RoutedExperts,
    product_into: ProductInto,
) -> torch.Tensor:
    """`moe_small_batch`: two products per pair of token and expert."""
    num_tokens, top_k = routed.expert_ids.shape
    outputs = x.new_empty(num_tokens, top_k, down.shape[1])
    for token, experts in enumerate(routed.expert_ids.tolist()):
        row = x[token : token + 1]
        for choice, expert in enumerate(experts):
            hidden = silu_and_mul(product_into(row, gate_up[expert], x.new_empty(1, gate_up.shape[1])))
            product_into(hidden, down[expert], outputs[token, choice : choice + 1])
    total = torch.zeros(num_tokens, down.shape[1])
    for choice in range(top_k):
        total.addcmul_(outputs[:, choice].float(), routed.weights[:, choice : choice + 1])
    return total.to(x.dtype)


def combine_experts(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor) -> torch.Tensor:
    """See `Operations.combine_experts`. A token's choices are added in their order, whatever the layout."""
    num_tokens, top_k = weights.shape
    place = torch.empty_like(layout.pair_ids)
    place[layout.pair_ids] = torch.arange(place.shape[0])
    place = place.view(num_tokens, top_k)
    total = torch.zeros(num_tokens, rows.shape[1])
    for choice in range(top_k):
        chosen = rows.index_select(0, place[:, choice]).float()
        total.addcmul_(chosen, weights[:, choice : choice + 1])
    return total.to(rows.dtype)
