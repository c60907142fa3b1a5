"""The gated activation of a feed-forward layer."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.triton.row_launch import gate_launch


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * WIDTH], model dtype: gate, then up
    out_ptr,  # [num_rows, WIDTH], model dtype, contiguous
    stride_gate_up_row,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
):
    """One tile of the result a program, tiles of a row next to each other.

    Grid: (cdiv(num_rows, BLOCK_ROWS) * cdiv(WIDTH, BLOCK_WIDTH),): one axis, since the others end at 65,535.
    """
    tiles_of_row: tl.constexpr = (WIDTH + BLOCK_WIDTH - 1) // BLOCK_WIDTH
    pid = tl.program_id(0)
    rows = (pid // tiles_of_row) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)[:, None]
    columns = (pid % tiles_of_row) * BLOCK_WIDTH + tl.arange(0, BLOCK_WIDTH)[None, :]
    mask = (rows < num_rows) & (columns < WIDTH)
    rows = rows.to(tl.int64)
    gate_ptrs = gate_up_ptr + rows * stride_gate_up_row + columns
    gate = tl.load(gate_ptrs, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(gate_ptrs + WIDTH, mask=mask, other=0.0).to(tl.float32)
    # exp overflows to infinity below -88, and the quotient is then the -0 it should be.
    activated = gate / (1.0 + tl.exp(-gate)) * up
    tl.store(out_ptr + rows * WIDTH + columns, activated.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_and_mul`. float32 between the two reads and the one rounding."""
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    launch = gate_launch(num_rows, width)
    grid = (triton.cdiv(num_rows, launch.block_rows) * triton.cdiv(width, launch.block_width),)
    silu_and_mul_kernel[grid](
        gate_up,
        out,
        gate_up.stride(0),
        num_rows,
        WIDTH=width,
        BLOCK_ROWS=launch.block_rows,
        BLOCK_WIDTH=launch.block_width,
        num_warps=launch.num_warps,
    )
    return out
