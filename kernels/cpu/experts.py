"""Mixture of experts: routes tokens to experts, multiplies each expert's rows by its weight and sums the results up."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)

from kernels.cpu.dense import fused_add_rms_norm, product, silu_and_mul
from kernels.operands import ExpertLayout, ExpertOutputs, PackedWeight, RoutedExperts

Tensor = torch.Tensor
# x [T, K], a packed weight [E, N, K], an expert -> [T, N].
Product = Callable[[Tensor, PackedWeight, int], Tensor]

# For these numbers of rows an expert computes `(w @ x.T).T`, from the left, and for others `x @ w.T`, from the right.
# Microseconds with cold weights, left / right, two threads, Xeon 2.5 GHz:
#
#   rows          2          8          12         15         16         32         48         56         60
#   768 x 512   161 / 104  251 / 212  174 / 176  173 / 184  209 / 456  364 / 599  437 / 693  591 / 738  927 / 673
#   512 x 384   116 / 66   146 / 104  100 / 84   102 / 92   103 / 197  216 / 308  281 / 355  363 / 384  440 / 271
#   2048 x 768  554 / 337  605 / 762  606 / 884             593 / 728  764 / 993  949 / 1169 1333 / 1297 1855 / 1404
MIN_LEFT_ROWS = 8
MIN_LEFT_ROWS_OF_SMALL = 13
SMALL_ELEMENTS = 1 << 20  # fewer: a small matrix
MAX_LEFT_ROWS = 56


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


def grouped_gemm(x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False) -> Tensor:
    """See `Operations.grouped_gemm`."""
    if x.dtype is torch.float32:
        products = plain_gemm(x, weight, layout, gather=gather)
    else:
        products = products_by_expert(x, weight, layout, expert_product, gather=gather)
    return silu_and_mul(products) if gated else products


def moe_small_batch(x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
    """See `Operations.moe_small_batch`."""
    return products_by_pair(x, gate_up, down, routed, expert_product)


def expert_product(x: Tensor, weight: PackedWeight, expert: int) -> Tensor:
    """x [T, K], weight [E, N, K] -> [T, N]."""
    return product(x, weight.matrices[expert])


def products_by_expert(
    x: Tensor, weight: PackedWeight, layout: ExpertLayout, multiply: Product, *, gather: bool
) -> Tensor:
    """`grouped_gemm`: one product for each expert that has rows; `multiply` takes its rows [n, K]."""
    rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
    parts = zip(torch.split(rows, layout.run_lens), layout.runs, strict=True)
    products = [multiply(part, weight, run.expert) for part, run in parts]
    return torch.cat(products) if products else x.new_empty(0, weight.shape[1])


def products_by_pair(
    x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts, multiply: Product
) -> Tensor:
    """`moe_small_batch`: two products for each pair of token and expert; `multiply` takes one row [1, K]."""
    outputs: list[Tensor] = []
    for row, experts in zip(x.unsqueeze(1), routed.expert_ids.tolist(), strict=True):
        outputs += [multiply(silu_and_mul(multiply(row, gate_up, expert)), down, expert) for expert in experts]
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


def add_experts_rms_norm(outputs: ExpertOutputs, residual: Tensor, weight: Tensor, eps: float) -> Tensor:
    """See `Operations.add_experts_rms_norm`."""
    return fused_add_rms_norm(combine_experts(*outputs), residual, weight, eps)


def _add_up(rows: Tensor, places: Tensor, weights: Tensor) -> Tensor:
    """rows [n, H]; places [T, top_k] int64, the rows of each token; weights [T, top_k] float32 -> like rows [T, H]."""
    if rows.dtype is torch.float32:
        # 64 tokens with 4 rows of 512 each: 0.08 ms; a gather and an addition for each choice take 0.26.
        return F.embedding_bag(places, rows, mode="sum", per_sample_weights=weights)
    total = torch.zeros(places.shape[0], rows.shape[1])
    for choice in range(places.shape[1]):
        total.addcmul_(rows.index_select(0, places[:, choice]).float(), weights[:, choice : choice + 1])
    return total.to(rows.dtype)


def plain_gemm(x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """`Operations.grouped_gemm` with weight [E, N, K] unchanged, each expert's rows multiplied from the faster side."""
    rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    columns = (torch.split(each.t(), layout.run_lens, dim=1) for each in (rows, out))
    is_small = weight.shape[1] * weight.shape[2] < SMALL_ELEMENTS
    min_left_rows = MIN_LEFT_ROWS_OF_SMALL if is_small else MIN_LEFT_ROWS
    for run, mine, products in zip(layout.runs, *columns, strict=True):
        matrix = weight.matrices[run.expert]
        if min_left_rows <= run.num_rows <= MAX_LEFT_ROWS:
            products.copy_(torch.mm(matrix, mine))
        else:  # `products` is a transposed view, for which PyTorch has the BLAS multiply the transposed matrices
            torch.mm(matrix, mine, out=products)
    return out


def route_and_sort(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, ExpertLayout]:
    """See `Operations.route_and_sort`."""
    routed = route_topk(router_logits, top_k, renormalise=renormalise)
    return routed.weights, sort_tokens_by_expert(routed.expert_ids, router_logits.shape[1])
