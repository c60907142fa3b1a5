"""The matrix products of a mixture-of-experts layer, each expert's rows in the tiles of `linear`."""

from __future__ import annotations

import torch

from kernels.cpu.experts import products_by_expert, products_by_pair
from kernels.deterministic.projection import linear_into
from kernels.expert_layout import ExpertLayout
from kernels.routed_experts import RoutedExperts


def grouped_gemm(x: torch.Tensor, weight: torch.Tensor, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`."""
    return products_by_expert(x, weight, layout, linear_into, gather=gather)


def moe_small_batch(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`. The bits are those of the sorted way: which one is taken is speed alone."""
    return products_by_pair(x, gate_up, down, routed, linear_into)
