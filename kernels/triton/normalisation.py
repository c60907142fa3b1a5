"""RMSNorm, alone and after the addition of a residual."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.row_launch import norm_launch


@triton.jit(do_not_specialize=["num_rows"])
def rms_norm_kernel(
    x_ptr,  # [num_rows, HIDDEN_SIZE], model dtype
    residual_ptr,  # [num_rows, HIDDEN_SIZE], model dtype, written in place; not touched unless ADD_RESIDUAL
    weight_ptr,  # [HIDDEN_SIZE], model dtype
    out_ptr,  # [num_rows, HIDDEN_SIZE], model dtype, contiguous
    stride_x_row,
    stride_residual_row,
    num_rows,
    eps,
    HIDDEN_SIZE: tl.constexpr,
    ADD_RESIDUAL: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """Whole rows a program: the sum of squares and the result come from one read.

    Grid: (cdiv(num_rows, BLOCK_ROWS),)
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = tl.arange(0, BLOCK_WIDTH)[None, :]
    in_row = columns < HIDDEN_SIZE
    mask = (rows < num_rows) & in_row
    rows = rows.to(tl.int64)
    x = tl.load(x_ptr + rows * stride_x_row + columns, mask=mask, other=0.0)
    if ADD_RESIDUAL:
        residual_ptrs = residual_ptr + rows * stride_residual_row + columns
        residual = tl.load(residual_ptrs, mask=mask, other=0.0)
        # Rounded before it is normalised: the next layer must find in the residual what this norm was taken of.
        x = (x.to(tl.float32) + residual.to(tl.float32)).to(residual.dtype)
        tl.store(residual_ptrs, x, mask=mask)
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1, keep_dims=True) / HIDDEN_SIZE
    normalised = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=in_row, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows * HIDDEN_SIZE + columns, (normalised * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return _launch(rows, None, weight, eps).view(x.shape)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.fused_add_rms_norm`.

    Raises ValueError where the elements of a row of residual do not lie side by side.
    """
    if residual.stride(1) != 1:
        raise ValueError(f"residual has strides {residual.stride()}; it is written in place, accepted: (any, 1)")
    return _launch(x if x.stride(1) == 1 else x.contiguous(), residual, weight, eps)


def _launch(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, residual [num_rows, H] -> [num_rows, H], contiguous."""
    num_rows, hidden_size = x.shape
    out = torch.empty((num_rows, hidden_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    launch = norm_launch(num_rows, hidden_size)
    rms_norm_kernel[(triton.cdiv(num_rows, launch.block_rows),)](
        x,
        x if residual is None else residual,
        weight.contiguous(),
        out,
        x.stride(0),
        0 if residual is None else residual.stride(0),
        num_rows,
        eps,
        HIDDEN_SIZE=hidden_size,
        ADD_RESIDUAL=residual is not None,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_WIDTH=launch.block_width,
        num_warps=launch.num_warps,
    )
    return out
