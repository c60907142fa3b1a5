"""Products with weights, quantised ones and plain: the operations `pack`, `linear` and those of experts.

Activations are rounded to 8 bits where the scheme says so and the GPU multiplies them; float8 ones are left as they are
on GPUs before compute capability 8.9, which only adds precision.
"""

from __future__ import annotations

import torch

from kernels.operands import ExpertLayout, PackedWeight, RoutedExperts
from kernels.quantised import QuantisedWeight
from kernels.triton import dense
from kernels.triton.combine_experts import combine_experts
from kernels.triton.experts import sort_tokens_by_expert
from kernels.triton.grouped_gemm import grouped_gemm as plain_grouped_gemm
from kernels.triton.launch import compute_capability
from kernels.triton.moe_small_batch import moe_small_batch as plain_moe_small_batch
from kernels.triton.packed_quantised import LEAST_STEP_OF_BYTES, PackedSteps, pack_steps
from kernels.triton.quantised_gemm import quantised_gemm_by_pair, quantised_grouped_gemm, quantised_linear
from kernels.triton.round_activations import RoundedActivations, round_activations

Tensor = torch.Tensor
FLOAT8_CAPABILITY = 89  # Ada: tensor cores multiply e4m3


def pack(weight: Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. A tensor as it is: cuBLAS and the Triton kernels read it as it lies in any dtype."""
    return pack_steps(weight) if isinstance(weight, QuantisedWeight) else PackedWeight.unchanged(weight)


def linear(x: Tensor, weight: PackedWeight, *, gated: bool = False) -> Tensor:
    """See `Operations.linear`."""
    if isinstance(weight, PackedSteps):
        return quantised_linear(x, weight, rounded_for(x, weight), gated=gated)
    return dense.linear(x, weight, gated=gated)


def grouped_gemm(x: Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False) -> Tensor:
    """See `Operations.grouped_gemm`."""
    if isinstance(weight, PackedSteps):
        return quantised_grouped_gemm(x, weight, rounded_for(x, weight), layout, gather=gather, gated=gated)
    return plain_grouped_gemm(x, weight, layout, gather=gather, gated=gated)


def moe_small_batch(x: Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> Tensor:
    """See `Operations.moe_small_batch`. Where one of the weights alone is quantised, pairs are sorted all the same."""
    if isinstance(gate_up, PackedSteps) and isinstance(down, PackedSteps):
        expert_ids = routed.expert_ids.contiguous()
        hidden = quantised_gemm_by_pair(x, gate_up, rounded_for(x, gate_up), expert_ids, gated=True)
        rows = quantised_gemm_by_pair(hidden, down, rounded_for(hidden, down), expert_ids, gated=False)
        places = torch.arange(expert_ids.numel(), dtype=torch.int32, device=x.device)
        in_order = ExpertLayout(places, places, expert_ids.shape[1], places)  # of which combining reads the places
        return combine_experts(rows, in_order, routed.weights)
    if not isinstance(gate_up, PackedSteps) and not isinstance(down, PackedSteps):
        return plain_moe_small_batch(x, gate_up, down, routed)
    layout = sort_tokens_by_expert(routed.expert_ids, gate_up.shape[0])
    hidden = grouped_gemm(x, gate_up, layout, gather=True, gated=True)
    return combine_experts(grouped_gemm(hidden, down, layout, gather=False), layout, routed.weights)


def rounded_for(x: Tensor, weight: PackedSteps) -> RoundedActivations | None:
    """Activations [n, K] as the weight's scheme has them; None: as they are."""
    asked = weight.scheme.activations
    if asked == "int8_token":
        return round_activations(x, torch.int8)
    if asked == "none" or not multiplies_float8(weight):
        return None
    group_size = weight.scheme.group_size if asked == "float8_group" else None
    return round_activations(x, torch.float8_e4m3fn, group_size=group_size, scale=weight.input_scale)


def multiplies_float8(weight: PackedSteps) -> bool:
    """Whether this GPU's tensor cores take such a weight and activations in e4m3."""
    return (
        weight.scheme.is_float and weight.block_k >= LEAST_STEP_OF_BYTES and compute_capability() >= FLOAT8_CAPABILITY
    )
