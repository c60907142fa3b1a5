"""What the number of tokens of a step decides about its kernels."""

from __future__ import annotations

from collections.abc import Hashable

from kernels.step_shape import StepShape
from kernels.triton.grouped_gemm_launch import grouped_gemm_launch
from kernels.triton.moe_launch import (
    MAX_PAIRS_PER_EXPERT_SCAN,
    combine_launch,
    expert_count_launch,
    expert_scan_launch,
)
from kernels.triton.row_launch import gate_launch, norm_launch
from kernels.triton.target import compute_capability


def launch_class(num_tokens: int, shape: StepShape) -> Hashable:
    """Equal for two numbers of tokens if the operations of all layers but attention launch the same kernels."""
    rows = (norm_launch(num_tokens, shape.hidden_size), gate_launch(num_tokens, shape.intermediate_size))
    if not shape.num_experts:
        return rows
    if shape.bucketed_min_tokens is None or num_tokens < shape.bucketed_min_tokens:
        return (*rows, "pair by pair")
    num_pairs = num_tokens * shape.top_k
    is_scan = num_pairs <= MAX_PAIRS_PER_EXPERT_SCAN
    return (
        *rows,
        expert_scan_launch(num_pairs) if is_scan else expert_count_launch(),
        grouped_gemm_launch(
            num_pairs, shape.top_k, shape.num_experts, itemsize=shape.itemsize, capability=compute_capability()
        ),
        gate_launch(num_pairs, shape.expert_size),
        combine_launch(num_tokens, shape.hidden_size),
    )
