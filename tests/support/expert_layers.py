"""Weights, routings and layouts for tests of the expert operations."""

from __future__ import annotations

import torch

from kernels import reference
from kernels.expert_types import ExpertLayout, RoutedExperts

# (tokens, experts, experts per token): one token, odd numbers, more experts than pairs (so most take none).
SHAPES = [(1, 8, 2), (13, 5, 3), (3, 128, 8), (21, 4, 4)]


def randn(*shape: int, seed: int, device: torch.device, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(device, dtype)


def framed(tensor: torch.Tensor) -> torch.Tensor:
    """The same values as a view into a larger buffer of NaN: a wrong stride or a missing mask reads one."""
    buffer = tensor.new_full((*tensor.shape[:-2], tensor.shape[-2] + 2, tensor.shape[-1] + 8), torch.nan)
    view = buffer[..., : tensor.shape[-2], : tensor.shape[-1]]
    return view.copy_(tensor)


def expert_weights(
    num_experts: int, rows: int, depth: int, device: torch.device, dtype: torch.dtype, seed: int = 4
) -> torch.Tensor:
    return framed(
        randn(num_experts, rows, depth, seed=seed, device=device, dtype=torch.float32).div(depth**0.5).to(dtype)
    )


def routing(num_tokens: int, num_experts: int, top_k: int, device: torch.device, seed: int = 3) -> RoutedExperts:
    routed = reference.route_topk(
        randn(num_tokens, num_experts, seed=seed, device=torch.device("cpu")), top_k, renormalise=True
    )
    return RoutedExperts(routed.weights.to(device), routed.expert_ids.to(device))


def layout_of(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    layout = reference.sort_tokens_by_expert(expert_ids.cpu(), num_experts)
    return ExpertLayout(
        layout.pair_ids.to(expert_ids.device), layout.expert_offsets.to(expert_ids.device), layout.top_k
    )


def on_cpu(layout: ExpertLayout) -> ExpertLayout:
    return ExpertLayout(layout.pair_ids.cpu(), layout.expert_offsets.cpu(), layout.top_k)
