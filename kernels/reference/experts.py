"""Mixture of experts."""

from __future__ import annotations

import math

import torch

from kernels.expert_layout import ExpertLayout
from kernels.packed_weight import PackedWeight
from kernels.reference.activation import silu_and_mul
from kernels.reference.projection import product
from kernels.routed_experts import RoutedExperts


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. One token at a time, one choice after the other."""
    num_tokens = router_logits.shape[0]
    weights = torch.empty(num_tokens, top_k)
    expert_ids = torch.empty(num_tokens, top_k, dtype=torch.int64)
    for token in range(num_tokens):
        probabilities = torch.softmax(router_logits[token].float(), dim=0)
        if any(math.isnan(value) for value in probabilities.tolist()):
            weights[token] = math.nan
            expert_ids[token] = torch.arange(top_k)
            continue
        ranked = sorted(range(len(probabilities)), key=lambda expert: (-float(probabilities[expert]), expert))
        expert_ids[token] = torch.tensor(ranked[:top_k])
        weights[token] = probabilities[expert_ids[token]]
        if renormalise:
            weights[token] /= weights[token].sum()
    return RoutedExperts(weights, expert_ids)


def sort_tokens_by_expert(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    """See `Operations.sort_tokens_by_expert`. Expert after expert, the pairs in order."""
    flat = expert_ids.flatten().tolist()
    pair_ids: list[int] = []
    offsets = [0]
    for expert in range(num_experts):
        pair_ids += [pair for pair, chosen in enumerate(flat) if chosen == expert]
        offsets.append(len(pair_ids))
    if len(pair_ids) != len(flat):
        raise ValueError(f"expert_ids outside 0 to {num_experts - 1}")
    return ExpertLayout(
        torch.tensor(pair_ids, dtype=torch.int64), torch.tensor(offsets, dtype=torch.int64), expert_ids.shape[1]
    )


def grouped_gemm(x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`. One row at a time."""
    out = x.new_empty(layout.pair_ids.shape[0], weight.shape[1])
    for expert in range(weight.shape[0]):
        for row in range(int(layout.expert_offsets[expert]), int(layout.expert_offsets[expert + 1])):
            source = int(layout.pair_ids[row]) // layout.top_k if gather else row
            out[row] = product(x[source : source + 1], weight.tensor[expert])[0]
    return out


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`."""
    out = torch.zeros(x.shape[0], down.shape[1])
    for token in range(x.shape[0]):
        for weight, expert in zip(routed.weights[token], routed.expert_ids[token].tolist(), strict=True):
            hidden = silu_and_mul(product(x[token : token + 1], gate_up.tensor[expert]))
            out[token] += weight * product(hidden, down.tensor[expert])[0].float()
    return out.to(x.dtype)


def combine_experts(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor) -> torch.Tensor:
    """See `Operations.combine_experts`."""
    num_tokens, top_k = weights.shape
    out = torch.zeros(num_tokens, rows.shape[1])
    for row, pair in enumerate(layout.pair_ids.tolist()):
        token, choice = divmod(pair, top_k)
        out[token] += weights[token, choice] * rows[row].float()
    return out.to(rows.dtype)
