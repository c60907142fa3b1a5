"""The matrix products of a mixture-of-experts layer, each expert's rows in the tiles of `linear`."""

from __future__ import annotations

import torch

from kernels.cpu.experts import products_by_expert, products_by_pair
from kernels.deterministic.projection import product
from kernels.expert_layout import ExpertLayout
from kernels.packed_weight import PackedWeight
from kernels.routed_experts import RoutedExperts


def grouped_gemm(x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`."""
    rows = products_by_expert(x, weight.matrices, layout, product, gather=gather)
    return torch.cat(rows) if rows else x.new_empty(0, weight.shape[1])


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`. The bits are those of the sorted way: which one is taken is speed alone."""
    return products_by_pair(x, gate_up.matrices, down.matrices, routed, product)
