"""The dense operations of a layer: matrix products by cuBLAS, RMSNorm and the gated activation as kernels.

Norms and the activation read rows once and are bound by memory, so what counts is bytes in flight: an H200 moves
4.3 TB/s at about 0.8 us of latency, that is 3.4 MB in flight or 26 KB on each of its 132 multiprocessors. A tile of
2,048 to 4,096 elements is 4 to 8 KiB of each bfloat16 operand, and at 23 to 48 registers a thread 8 to 16 programs fit:
64 KiB and more. The tile sizes follow from that and from the shapes: 58 to 88 % of a copy's rate, the gate 87 to 100.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F  # noqa: N812  (the customary name)
import triton
import triton.language as tl

from kernels.operands import PackedWeight
from kernels.triton.launch import TileLaunch

# From so many programs of one row on, every multiprocessor of an H200 or A100 (132, 108) has its 16 and a second round,
# and several short rows may share a program; with fewer, one row each keeps more multiprocessors busy.
MANY_ROWS = 4096
NORM_TILE_ELEMENTS = 4096
GATE_TILE_ELEMENTS = 2048
MAX_GATE_WIDTH = 1024
MIN_GATE_WIDTH = 256


def linear(x: torch.Tensor, weight: PackedWeight, *, gated: bool = False) -> torch.Tensor:
    """See `Operations.linear`. One call of a library through PyTorch, not a Triton kernel.

    Nothing is gathered and nothing is fused, so a kernel of ours could only win by being a better GEMM, and Triton's
    come near the library's and not past them. At up to 64 tokens both are bound by reading the weight.

    Without a bias PyTorch calls cuBLAS, whose heuristics choose the kernel; it calls cuBLASLt only for a bias in the
    epilogue, or where `torch.backends.cuda.preferred_blas_library("cublaslt")` asks for it, which takes
    0.4 % longer over Qwen3-8B's products of 1, 64 and 256 rows (H200).

    Sums are float32, as the interface asks, only where
    `torch.backends.cuda.matmul.allow_{bf16,fp16}_reduced_precision_reduction` and `allow_tf32` are off; PyTorch has the
    first two on. They are settings of the process, so the loading of the model switches them off.
    """
    out = F.linear(x, weight.tensor)
    return silu_and_mul(out) if gated else out


@triton.jit
def normalised(
    x,  # [rows, BLOCK_WIDTH], model dtype: whole rows, 0 past their end
    weight_ptr,  # [HIDDEN_SIZE], model dtype
    columns,  # [1, BLOCK_WIDTH]
    eps,
    HIDDEN_SIZE: tl.constexpr,
):
    """RMSNorm of each row, rounded before it is multiplied by the weight and after."""
    wide = x.to(tl.float32)
    mean_square = tl.sum(wide * wide, axis=1, keep_dims=True) / HIDDEN_SIZE
    rounded = (wide * tl.rsqrt(mean_square + eps)).to(x.dtype).to(tl.float32)
    weight = tl.load(weight_ptr + columns, mask=columns < HIDDEN_SIZE, other=0.0).to(tl.float32)
    return (rounded * weight).to(x.dtype)


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
    out = normalised(x, weight_ptr, columns, eps, HIDDEN_SIZE)
    tl.store(out_ptr + rows * HIDDEN_SIZE + columns, out, mask=mask)


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.rms_norm`."""
    rows = x.reshape(-1, x.shape[-1])
    if rows.stride(1) != 1:
        rows = rows.contiguous()
    return _launch_norm(rows, None, weight, eps).view(x.shape)


def fused_add_rms_norm(x: torch.Tensor, residual: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """See `Operations.fused_add_rms_norm`.

    Raises ValueError where the elements of a row of residual do not lie side by side.
    """
    if residual.stride(1) != 1:
        raise ValueError(f"residual has strides {residual.stride()}; it is written in place, accepted: (any, 1)")
    return _launch_norm(x if x.stride(1) == 1 else x.contiguous(), residual, weight, eps)


def _launch_norm(x: torch.Tensor, residual: torch.Tensor | None, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x, residual [num_rows, H] -> [num_rows, H], contiguous."""
    num_rows, hidden_size = x.shape
    out = torch.empty((num_rows, hidden_size), dtype=x.dtype, device=x.device)
    if num_rows == 0:
        return out
    launch = norm_launch(num_rows, hidden_size)
    rms_norm_kernel[(triton.cdiv(num_rows, launch.rows),)](
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
        BLOCK_ROWS=launch.rows,
        BLOCK_WIDTH=launch.columns,
        num_warps=launch.num_warps,
    )
    return out


@triton.jit(do_not_specialize=["num_rows"])
def silu_and_mul_kernel(
    gate_up_ptr,  # [num_rows, 2 * WIDTH], model dtype: gate, then up
    out_ptr,  # [num_rows, WIDTH], model dtype, contiguous
    stride_gate_up_row,
    num_rows,
    WIDTH: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
    BLOCK_WIDTH: tl.constexpr,
    IS_GELU: tl.constexpr = False,  # by its tanh form
    ALPHA: tl.constexpr = 1.0,
    LIMIT: tl.constexpr = 0.0,  # of the gate above, of up on both sides, which 1 is added to; 0: as they are
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
    if LIMIT > 0:  # comparisons, which leave a NaN, where a GPU's minimum does not
        gate = tl.where(gate > LIMIT, LIMIT, gate)
        up = tl.where(up > LIMIT, LIMIT, tl.where(up < -LIMIT, -LIMIT, up)) + 1.0
    sharpness = gate * ALPHA
    if IS_GELU:  # (1 + tanh(y)) / 2 is the sigmoid of 2 y, y = sqrt(2 / pi) (x + 0.044715 x^3)
        sharpness = gate * (1.5957691216057308 + 0.07135481282553624 * gate * gate)
    # exp overflows to infinity below -88, and the quotient is then the -0 it should be.
    activated = gate / (1.0 + tl.exp(-sharpness)) * up
    tl.store(out_ptr + rows * WIDTH + columns, activated.to(out_ptr.dtype.element_ty), mask=mask)


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_and_mul`. float32 between the two reads and the one rounding."""
    return _activate_and_mul(gate_up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.gelu_and_mul`. As `silu_and_mul`."""
    return _activate_and_mul(gate_up, IS_GELU=True)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See `Operations.clamped_swiglu`. As `silu_and_mul`, compiled for these two numbers."""
    return _activate_and_mul(gate_up, ALPHA=alpha, LIMIT=limit)


def cap_logits(logits: torch.Tensor, cap: float) -> None:
    """See `Operations.cap_logits`. By PyTorch's own kernels: one a step, behind the product with the head."""
    logits.copy_(logits.float().div_(cap).tanh_().mul_(cap))


def _activate_and_mul(gate_up: torch.Tensor, **options: float) -> torch.Tensor:
    if gate_up.stride(1) != 1:
        gate_up = gate_up.contiguous()
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((num_rows, width), dtype=gate_up.dtype, device=gate_up.device)
    if out.numel() == 0:
        return out
    launch = gate_launch(num_rows, width)
    grid = (triton.cdiv(num_rows, launch.rows) * triton.cdiv(width, launch.columns),)
    silu_and_mul_kernel[grid](
        gate_up,
        out,
        gate_up.stride(0),
        num_rows,
        WIDTH=width,
        BLOCK_ROWS=launch.rows,
        BLOCK_WIDTH=launch.columns,
        **options,
        num_warps=launch.num_warps,
    )
    return out


def norm_launch(num_rows: int, hidden_size: int) -> TileLaunch:
    """A tile holds whole rows, since a norm needs a row's sum before its first result.

    Warps as in Liger-Kernel's `calculate_settings`: a thread holds 8 to 32 elements of each operand.
    """
    width = triton.next_power_of_2(hidden_size)
    rows = max(NORM_TILE_ELEMENTS // width, 1) if num_rows >= MANY_ROWS else 1
    rows = min(rows, 16)  # narrower rows than 256 elements gain nothing from more
    num_warps = 4 if width < 2048 else 8 if width < 8192 else 16
    return TileLaunch(rows, width, num_warps)


def gate_launch(num_rows: int, intermediate_size: int) -> TileLaunch:
    """A tile is a piece of one row, or of several where rows are many.

    Its width divides the row where a power of two from 256 on does (768 = 3 x 256, 14,336 = 14 x 1,024), so that no
    lane idles; else the last piece is masked.
    """
    largest_divisor = intermediate_size & -intermediate_size
    width = min(largest_divisor, MAX_GATE_WIDTH)
    if width < MIN_GATE_WIDTH:
        width = min(triton.next_power_of_2(intermediate_size), MAX_GATE_WIDTH)
    rows = min(GATE_TILE_ELEMENTS // width, 16) if num_rows >= MANY_ROWS else 1
    num_warps = min(max(rows * width // 256, 1), 4)  # 8 elements a thread and operand, or 16 in the largest tile
    return TileLaunch(rows, width, num_warps)
