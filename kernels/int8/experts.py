"""The matrix products of a mixture-of-experts layer with weights of 8 bits."""

from __future__ import annotations

import torch

from kernels.cpu.activation import silu_and_mul
from kernels.cpu.experts import add_choices
from kernels.expert_layout import ExpertLayout
from kernels.int8.projection import product
from kernels.int8.quantised_rows import quantise_rows
from kernels.packed_weight import PackedWeight
from kernels.routed_experts import RoutedExperts


def grouped_gemm(x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """See `Operations.grouped_gemm`. Tokens are rounded once, not once for each of their experts."""
    rows = quantise_rows(x)
    if gather:
        rows = rows.select(layout.pair_ids // layout.top_k)
    parts = rows.split(layout.run_lens)
    products = [product(part, weight, run.expert, x.dtype) for part, run in zip(parts, layout.runs, strict=True)]
    return torch.cat(products) if products else x.new_empty(0, weight.shape[1])


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`."""
    outputs = []
    for token, experts in enumerate(routed.expert_ids.tolist()):
        row = quantise_rows(x[token : token + 1])
        for expert in experts:
            hidden = silu_and_mul(product(row, gate_up, expert, x.dtype))
            outputs.append(product(quantise_rows(hidden), down, expert, x.dtype))
    return add_choices(outputs, routed, x)
