"""The matrix products of a mixture-of-experts layer."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.cpu.activation import silu_and_mul
from kernels.cpu.batched_experts import batched_gemm, is_batched
from kernels.cpu.projection import product
from kernels.expert_layout import ExpertLayout
from kernels.packed_weight import PackedWeight
from kernels.routed_experts import RoutedExperts

Tensor = torch.Tensor
# Rows of an expert for which a plain matrix is multiplied from the left, in float32. ms for all 32 experts of 768 x 512
# and of 512 x 384 with 4, 8, 16, 32 and 64 rows on average, two threads, Xeon 2.5 GHz: from the left 9.4, 9.5, 11.5, 16
# and 23, from the right 7.9, 9.5, 18.9, 30 and 20.5, in oneDNN's blocked layout 11.9, 12.1, 15.6, 20.6 and 20.2. One
# token's 4 experts: 1.06, 1.11 and 2.03.
MIN_LEFT_ROWS = 8
MAX_LEFT_ROWS = 63
# A matrix [N, K] of each expert, or all of them [E, N, K]: to take one costs 3 us, to unbind 32 of them 140.
Matrices = Sequence[Tensor] | Tensor
# x [T, K], one expert's matrix [N, K] in some layout -> [T, N].
Product = Callable[[Tensor, Tensor], Tensor]


def grouped_gemm(x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> Tensor:
    """See `Operations.grouped_gemm`."""
    if x.dtype is torch.float32 and is_batched(layout.runs, weight.shape[0]):
        return batched_gemm(x, weight.tensor, layout, gather=gather)
    rows = products_by_expert(x, _matrices(weight), layout, expert_product, gather=gather)
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[1])


def moe_small_batch(x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
    """See `Operations.moe_small_batch`."""
    return products_by_pair(x, _matrices(gate_up), _matrices(down), routed, expert_product)


def _matrices(weight: PackedWeight) -> Matrices:
    """Of each expert, as `pack` left it."""
    return weight.tensor if weight.parts[0].dtype is torch.float32 else weight.parts


def expert_product(x: Tensor, matrix: Tensor) -> Tensor:
    """`product` of one expert's few rows. x [n, K], matrix [N, K] as `pack` left it -> [n, N], any strides.

    In float32, a plain matrix is multiplied from the side that is faster.
    """
    if x.dtype is not torch.float32:
        return product(x, matrix)
    if MIN_LEFT_ROWS <= x.shape[0] <= MAX_LEFT_ROWS:
        return torch.mm(matrix, x.t()).t()
    return F.linear(x, matrix)


def products_by_expert(
    x: Tensor, experts: Matrices, layout: ExpertLayout, multiply: Product, *, gather: bool
) -> list[Tensor]:
    """`grouped_gemm`: one product per expert that has rows, in the layout's order.

    experts: matrices in the form that `multiply` takes beside rows [n, K]; -> [n, N] each.
    """
    rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
    return [multiply(rows[start:end], experts[expert]) for expert, start, end in layout.runs]


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
    num_tokens, top_k = routed.expert_ids.shape
    rows = torch.cat(list(outputs)).view(num_tokens, top_k, -1)
    total = torch.zeros(num_tokens, rows.shape[2])
    for choice in range(top_k):
        total.addcmul_(rows[:, choice].float(), routed.weights[:, choice : choice + 1])
    return total.to(x.dtype)


def combine_experts(rows: Tensor, layout: ExpertLayout, weights: Tensor) -> Tensor:
    """See `Operations.combine_experts`. A token's choices are added in their order, whatever the layout."""
    place = torch.empty_like(layout.pair_ids)
    place[layout.pair_ids] = torch.arange(place.shape[0])
    wide = rows.float().contiguous()
    # 64 tokens with 4 choices of 512 each: 0.08 ms; a gather and an addition for each choice take 0.26.
    total = F.embedding_bag(place.view(weights.shape), wide, mode="sum", per_sample_weights=weights)
    return total.to(rows.dtype)
