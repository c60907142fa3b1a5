"""The sum of what a token's experts made of it."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.expert_layout import ExpertLayout
from kernels.triton.moe_launch import combine_launch

INVERT_BLOCK = 256


@triton.jit(do_not_specialize=["num_pairs"])
def _invert_kernel(
    pair_ids_ptr,  # [P], int64
    places_ptr,  # [P], int32
    num_pairs,
    BLOCK: tl.constexpr,
):
    """The row at which each pair lies.

    Grid: (cdiv(P, BLOCK),)
    """
    rows = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    is_row = rows < num_pairs
    pairs = tl.load(pair_ids_ptr + rows, mask=is_row, other=0)
    tl.store(places_ptr + pairs, rows, mask=is_row)


@triton.jit
def _combine_experts_kernel(
    rows_ptr,  # [T * TOP_K, H], model dtype
    places_ptr,  # [T * TOP_K], int32
    weights_ptr,  # [T, TOP_K], float32
    out_ptr,  # [T, H], model dtype
    hidden_size,
    stride_rows_row,
    stride_rows_column,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one token: its choices in their order, so that the sum is always the same.

    Grid: (T, cdiv(H, BLOCK))
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden_size
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled: the reads of all choices are in flight together
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        row_ptrs = rows_ptr + place * stride_rows_row + columns * stride_rows_column
        row = tl.load(row_ptrs, mask=is_column, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + token * TOP_K + choice) * row
    tl.store(out_ptr + token * hidden_size + columns, total.to(out_ptr.dtype.element_ty), mask=is_column)


def combine_experts(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor) -> torch.Tensor:
    """See `Operations.combine_experts`."""
    num_tokens, top_k = weights.shape
    num_pairs, hidden_size = rows.shape
    out = torch.empty(num_tokens, hidden_size, dtype=rows.dtype, device=rows.device)
    if num_tokens == 0:
        return out
    places = torch.empty(num_pairs, dtype=torch.int32, device=rows.device)
    _invert_kernel[(triton.cdiv(num_pairs, INVERT_BLOCK),)](
        layout.pair_ids, places, num_pairs, BLOCK=INVERT_BLOCK, num_warps=4
    )
    launch = combine_launch(num_tokens, hidden_size)
    _combine_experts_kernel[(num_tokens, triton.cdiv(hidden_size, launch.columns))](
        rows,
        places,
        weights.contiguous(),
        out,
        hidden_size,
        *rows.stride(),
        TOP_K=top_k,
        BLOCK=launch.columns,
        num_warps=launch.num_warps,
    )
    return out
