"""Products with experts whose matrices lie as they are, in float32."""

from __future__ import annotations

import torch

from kernels.expert_layout import ExpertLayout
from kernels.packed_weight import PackedWeight

# Rows of an expert that are multiplied from the left: us with cold weights, left / right, two threads, Xeon 2.5 GHz:
#
#   rows          2          8          12         15         16         32         48         56         60
#   768 x 512   161 / 104  251 / 212  174 / 176  173 / 184  209 / 456  364 / 599  437 / 693  591 / 738  927 / 673
#   512 x 384   116 / 66   146 / 104  100 / 84   102 / 92   103 / 197  216 / 308  281 / 355  363 / 384  440 / 271
#   2048 x 768  554 / 337  605 / 762  606 / 884             593 / 728  764 / 993  949 / 1169 1333 / 1297 1855 / 1404
#
# One batched product over all experts, padded to the one with the most rows, is 18 % slower to 3 % faster with 4 to 32
# rows on average, and reads idle experts for nothing.
MIN_LEFT_ROWS = 8
MIN_LEFT_ROWS_OF_SMALL = 13
SMALL_ELEMENTS = 1 << 20  # fewer: a small matrix
MAX_LEFT_ROWS = 56


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
        else:  # products lie by columns, for which PyTorch has the BLAS multiply the transposed matrices
            torch.mm(matrix, mine, out=products)
    return out
