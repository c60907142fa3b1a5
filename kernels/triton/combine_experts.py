"""Mixture of experts behind the matrix products: adds up what a token's experts answered, alone or within a norm.

None of the launch parameters is measured yet.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.operands import ExpertLayout, ExpertOutputs
from kernels.triton.dense import norm_launch, normalised
from kernels.triton.launch import TileLaunch, power_of_two_from


@triton.jit
def _sum_of_choices(
    rows_ptr,  # [T * TOP_K, H], model dtype
    places_ptr,  # [T * TOP_K], int32
    weights_ptr,  # [T, TOP_K], float32
    token,  # int64
    columns,
    is_column,
    stride_rows_row,
    stride_rows_column,
    TOP_K: tl.constexpr,
):
    """Some columns of one token, rounded: its choices in their order, so that the sum is always the same."""
    total = tl.zeros([columns.shape[0]], dtype=tl.float32)
    for choice in tl.static_range(TOP_K):  # unrolled: the reads of all choices are in flight together
        place = tl.load(places_ptr + token * TOP_K + choice).to(tl.int64)
        row_ptrs = rows_ptr + place * stride_rows_row + columns * stride_rows_column
        row = tl.load(row_ptrs, mask=is_column, other=0.0).to(tl.float32)
        total += tl.load(weights_ptr + token * TOP_K + choice) * row
    return total.to(rows_ptr.dtype.element_ty)


@triton.jit
def _combine_experts_kernel(
    rows_ptr,  # this and the next two: as of `_sum_of_choices`
    places_ptr,
    weights_ptr,
    out_ptr,  # [T, H], model dtype
    hidden_size,
    stride_rows_row,
    stride_rows_column,
    TOP_K: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK elements of one token.

    Grid: (T, cdiv(H, BLOCK))
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    is_column = columns < hidden_size
    total = _sum_of_choices(
        *(rows_ptr, places_ptr, weights_ptr, token, columns, is_column, stride_rows_row, stride_rows_column, TOP_K)
    )
    tl.store(out_ptr + token * hidden_size + columns, total, mask=is_column)


def combine_experts(rows: torch.Tensor, layout: ExpertLayout, weights: torch.Tensor) -> torch.Tensor:
    """See `Operations.combine_experts`."""
    num_tokens, top_k = weights.shape
    hidden_size = rows.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=rows.dtype, device=rows.device)
    if num_tokens == 0:
        return out
    launch = combine_launch(num_tokens, hidden_size)
    _combine_experts_kernel[(num_tokens, triton.cdiv(hidden_size, launch.columns))](
        rows,
        layout.places,
        weights.contiguous(),
        out,
        hidden_size,
        *rows.stride(),
        TOP_K=top_k,
        BLOCK=launch.columns,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit
def _add_experts_rms_norm_kernel(
    rows_ptr,  # this and the next two: as of `_sum_of_choices`
    places_ptr,
    weights_ptr,
    residual_ptr,  # [T, HIDDEN_SIZE], model dtype, written in place
    norm_weight_ptr,  # [HIDDEN_SIZE], model dtype
    out_ptr,  # [T, HIDDEN_SIZE], model dtype, contiguous
    stride_rows_row,
    stride_rows_column,
    stride_residual_row,
    eps,
    TOP_K: tl.constexpr,
    HIDDEN_SIZE: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """One token a program: the sum of its choices is added to its residual, and the norm taken, in registers.

    Grid: (T,)
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, BLOCK_WIDTH)
    is_column = columns < HIDDEN_SIZE
    x = _sum_of_choices(
        *(rows_ptr, places_ptr, weights_ptr, token, columns, is_column, stride_rows_row, stride_rows_column, TOP_K)
    )
    residual_ptrs = residual_ptr + token * stride_residual_row + columns
    residual = tl.load(residual_ptrs, mask=is_column, other=0.0)
    x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
    tl.store(residual_ptrs, x, mask=is_column)
    out = normalised(x[None, :], norm_weight_ptr, columns[None, :], eps, HIDDEN_SIZE)
    tl.store(out_ptr + token * HIDDEN_SIZE + columns[None, :], out, mask=is_column[None, :])


def add_experts_rms_norm(
    outputs: ExpertOutputs, residual: torch.Tensor, weight: torch.Tensor, eps: float
) -> torch.Tensor:
    """See `Operations.add_experts_rms_norm`. One launch, in which the sum is neither written nor read again.

    Raises ValueError where the elements of a row of residual do not lie side by side.
    """
    if residual.stride(1) != 1:
        raise ValueError(f"residual has strides {residual.stride()}; it is written in place, accepted: (any, 1)")
    rows, layout, weights = outputs
    num_tokens, top_k = weights.shape
    hidden_size = rows.shape[1]
    out = torch.empty(num_tokens, hidden_size, dtype=rows.dtype, device=rows.device)
    if num_tokens == 0:
        return out
    launch = norm_launch(1, hidden_size)
    _add_experts_rms_norm_kernel[(num_tokens,)](
        rows,
        layout.places,
        weights.contiguous(),
        residual,
        weight.contiguous(),
        out,
        *rows.stride(),
        residual.stride(0),
        eps,
        TOP_K=top_k,
        HIDDEN_SIZE=hidden_size,
        BLOCK_WIDTH=launch.columns,
        num_warps=launch.num_warps,
    )
    return out


def combine_launch(num_tokens: int, hidden_size: int) -> TileLaunch:
    """columns = elements of a token that a program sums: 16 bytes of bfloat16 a thread and choice.

    A few tokens are cut finer, so that 64 tokens of width 2048 make 512 programs and not 128.
    """
    num_warps = 1 if num_tokens <= 256 else 4
    return TileLaunch(1, min(power_of_two_from(hidden_size), 256 * num_warps), num_warps)
