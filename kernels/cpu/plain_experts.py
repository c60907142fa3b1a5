"""Products with experts whose matrices lie as they are, in float32."""

from __future__ import annotations

import torch

from kernels.expert_layout import ExpertLayout

# Rows of an expert that are multiplied from the left. ms for all 32 experts of 768 x 512 and of 512 x 384 with 4, 8,
# 16, 32 and 64 rows on average, two threads, Xeon 2.5 GHz: from the left 9.4, 9.5, 11.5, 16 and 23, from the right 7.9,
# 9.5, 18.9, 30 and 20.5, in oneDNN's blocked layout 11.9, 12.1, 15.6, 20.6 and 20.2. One token's 4 experts: 1.06, 1.11
# and 2.03. One of 768 x 512 with 54, 58 and 62 rows: 476, 734, 812 us from the left, 708, 532, 538 from the right.
MIN_LEFT_ROWS = 8
MAX_LEFT_ROWS = 56


def plain_gemm(x: torch.Tensor, weight: torch.Tensor, layout: ExpertLayout, *, gather: bool) -> torch.Tensor:
    """`Operations.grouped_gemm` with weight [E, N, K], each expert's rows multiplied from the faster side."""
    rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
    out = rows.new_empty(rows.shape[0], weight.shape[1])
    parts = (torch.split(each, layout.run_lens) for each in (rows, out))
    for run, mine, products in zip(layout.runs, *parts, strict=True):
        matrix = weight[run.expert]
        if MIN_LEFT_ROWS <= run.num_rows <= MAX_LEFT_ROWS:
            products.copy_(torch.mm(matrix, mine.t()).t())
        else:
            torch.mm(mine, matrix.t(), out=products)
    return out
