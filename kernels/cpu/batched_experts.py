"""All experts of a layer in one batched product."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from kernels.expert_layout import ExpertLayout
from kernels.expert_run import ExpertRun
from kernels.packed_weight import PackedWeight

# Rows of an expert on average, and of the one with the most, for which one batched product is the fastest: ms for all
# 32 experts of 768 x 512 and of 512 x 384 with 4, 8, 16 and 32 rows on average (8 to 48 at most), two threads, Xeon
# 2.5 GHz: 8.1, 7.9, 10.9 and 15.4, one by one 7.9, 9.5, 11.5 and 16.0. Beside another program 20 instead of 190:
# threads meet once in a batched product, and once an expert in the others.
MIN_MEAN_ROWS = 4
MAX_ROWS = 64
MAX_PADDING = 2  # rows that are computed for each that is wanted
# Of the experts, how many may be read for nothing: 16 of 32 without a row make it 12.2 ms instead of 6.8.
MAX_IDLE = 1 / 8


def is_batched(runs: Sequence[ExpertRun], num_experts: int) -> bool:
    """Whether one batched product is the fastest for experts with so many rows each."""
    if not runs or num_experts - len(runs) > MAX_IDLE * num_experts:
        return False
    lens = [run.num_rows for run in runs]
    total, most = sum(lens), max(lens)
    is_padded_little = most * num_experts <= MAX_PADDING * total
    return most <= MAX_ROWS and MIN_MEAN_ROWS * num_experts <= total and is_padded_little


def batched_gemm(x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """`Operations.grouped_gemm` with weight [E, N, K] unchanged, float32. At least one row.

    Each expert's rows are padded to those of the one with the most, by a row that is there, and multiplied from the
    left, which is the faster side.
    """
    places, experts, columns = layout.padded
    rows = layout.pair_ids[places] // layout.top_k if gather else places
    padded = x.index_select(0, rows.flatten()).view(*rows.shape, -1)
    products = torch.bmm(weight.tensor, padded.transpose(1, 2))  # [E, N, most rows]
    return products.transpose(1, 2)[experts, columns]
