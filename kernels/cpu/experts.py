"""The matrix products of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.cpu.activation import silu_and_mul
from kernels.cpu.plain_experts import plain_gemm
from kernels.cpu.projection import product
from kernels.expert_layout import ExpertLayout
from kernels.packed_weight import PackedWeight
from kernels.routed_experts import RoutedExperts

Tensor = torch.Tensor
Matrices = Sequence[Tensor]  # [N, K] of each expert
# x [T, K], one expert's matrix [N, K] in some layout -> [T, N].
Product = Callable[[Tensor, Tensor], Tensor]


def grouped_gemm(x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> Tensor:
    """See `Operations.grouped_gemm`."""
    if x.dtype is torch.float32:
        return plain_gemm(x, weight, layout, gather=gather)
    rows = products_by_expert(x, weight.matrices, layout, product, gather=gather)
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[1])


def moe_small_batch(x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
    """See `Operations.moe_small_batch`."""
    return products_by_pair(x, gate_up.matrices, down.matrices, routed, product)


def products_by_expert(
    x: Tensor, experts: Matrices, layout: ExpertLayout, multiply: Product, *, gather: bool
) -> list[Tensor]:
    """`grouped_gemm`: one product per expert that has rows, in the layout's order.

    experts: matrices in the form that `multiply` takes beside rows [n, K]; -> [n, N] each.
    """
    rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
    parts = zip(torch.split(rows, layout.run_lens), layout.runs, strict=True)
    return [multiply(part, experts[run.expert]) for part, run in parts]


def products_by_pair(x: Tensor, gate_up: Matrices, down: Matrices, routed: RoutedExperts, multiply: Product) -> Tensor:
    """`moe_small_batch`: two products per pair of token and expert. x [T, H] -> [T, H].

    gate_up [2I, H] and down [H, I] of each expert, in the form that `multiply` takes beside one row.
    """
    outputs = []
    for row, experts in zip(torch.split(x, 1), routed.expert_ids.tolist(), strict=True):
        outputs += [multiply(silu_and_mul(multiply(row, gate_up[expert])), down[expert]) for expert in experts]
    return add_choices(outputs, routed, x)


def add_choices(outputs: Sequence[Tensor], routed: RoutedExperts, x: Tensor) -> Tensor:
    """Weighted sum of the outputs [1, H] of each pair, a token's choices together and in order -> like x [T, H]."""
    if not outputs:
        return torch.empty_like(x)
    places = torch.arange(routed.expert_ids.numel()).view(routed.expert_ids.shape)
    return _add_up(torch.cat(list(outputs)), places, routed.weights)


def combine_experts(rows: Tensor, layout: ExpertLayout, weights: Tensor) -> Tensor:
    """See `Operations.combine_experts`. A token's choices are added in their order, whatever the layout."""
    places = torch.empty_like(layout.pair_ids)
    places.scatter_(0, layout.pair_ids, torch.arange(places.shape[0]))
    return _add_up(rows, places.view(weights.shape), weights)


def _add_up(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """rows [n, H]; places [T, top_k] int64, the rows of each token; weights [T, top_k] float32 -> like rows [T, H]."""
    if rows.dtype is torch.float32:
        # 64 tokens with 4 rows of 512 each: 0.08 ms; a gather and an addition for each choice take 0.26.
        return F.embedding_bag(places, rows, mode="sum", per_sample_weights=weights)
    total = torch.zeros(places.shape[0], rows.shape[1])
    for choice in range(places.shape[1]):
        total.addcmul_(rows.index_select(0, places[:, choice]).float(), weights[:, choice : choice + 1])
    return total.to(rows.dtype)
