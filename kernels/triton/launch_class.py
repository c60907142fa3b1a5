"""Says which numbers of tokens launch the same kernels, so that a warm-up compiles each of them once."""

from __future__ import annotations

from collections.abc import Hashable

from kernels.interface import StepShape
from kernels.triton.dense import gate_launch, norm_launch
from kernels.triton.experts import MAX_PAIRS_PER_EXPERT_SCAN, combine_launch, expert_count_launch, expert_scan_launch
from kernels.triton.grouped_gemm import grouped_gemm_launch
from kernels.triton.launch import compute_capability


def launch_class(num_tokens: int, shape: StepShape) -> Hashable:
    """Equal for two numbers of tokens for which all operations but attention launch the same kernels."""
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
