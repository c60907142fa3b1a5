"""Rounds activations to 8 bits, integers or float8 e4m3, for products whose scheme asks for it."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.quantised import LARGEST_FLOAT8, LARGEST_INT8
from kernels.triton.launch import TileLaunch, power_of_two_from

_LARGEST_FLOAT8, _LARGEST_INT8 = tl.constexpr(LARGEST_FLOAT8), tl.constexpr(float(LARGEST_INT8))
_LEAST = tl.constexpr(1e-35)  # 448 / 1e-36 would overflow; a group of smaller values becomes zeros or close to them
ROUNDED_TILE_ELEMENTS = 2048


class RoundedActivations(NamedTuple):
    """Activations of 8 bits: each is its value times the scale of its row, or of its group."""

    values: torch.Tensor  # [T, K], int8 or float8_e4m3fn
    scales: torch.Tensor  # [T, groups], float32


@triton.jit
def round_to_float8(steps):
    """float32 of at most 448 in magnitude, to the 3 bits of e4m3's mantissa, half to even: before the conversion, since
    the interpreter's truncates. Below 2^-6 steps are 2^-9 wide.
    """
    bits = steps.to(tl.int32, bitcast=True)
    bits = (bits + 0x7FFFF + ((bits >> 20) & 1)) & -0x100000
    return tl.where(tl.abs(steps) < 0.015625, (steps + 24576.0) - 24576.0, bits.to(tl.float32, bitcast=True))


@triton.jit
def _round_activations_kernel(
    x_ptr,  # [T, K], model dtype
    values_ptr,  # [T, K], int8 or float8e4nv
    scales_ptr,  # [T, groups], float32
    given_scale_ptr,  # [1], float32; None: a scale makes the largest magnitude of its group 127 or 448
    depth,
    group_size,
    num_groups,
    stride_x_row,
    BLOCK_GROUPS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """BLOCK_GROUPS groups of one row. A group with a NaN or an infinity gets such a scale, so that products show it.

    Grid: (T, cdiv(groups, BLOCK_GROUPS))
    """
    row = tl.program_id(0).to(tl.int64)
    groups = tl.program_id(1) * BLOCK_GROUPS + tl.arange(0, BLOCK_GROUPS)
    places = tl.arange(0, BLOCK)
    ks = groups[:, None] * group_size + places[None, :]
    mask = (groups < num_groups)[:, None] & (places < group_size)[None, :] & (ks < depth)
    x = tl.load(x_ptr + row * stride_x_row + ks, mask=mask, other=0.0).to(tl.float32)
    is_int: tl.constexpr = values_ptr.dtype.element_ty == tl.int8
    limit: tl.constexpr = _LARGEST_INT8 if is_int else _LARGEST_FLOAT8
    magnitudes = tl.abs(x)
    is_finite = magnitudes < float("inf")  # not where NaN
    if given_scale_ptr is None:
        largest = tl.maximum(tl.max(tl.where(is_finite, magnitudes, 0.0), 1), _LEAST)
        inverses = 1.0 / largest * limit
        scales, steps = largest * (1.0 / limit), x * inverses[:, None]
    else:
        scales = tl.load(given_scale_ptr) + tl.zeros([BLOCK_GROUPS], dtype=tl.float32)
        steps = x / scales[:, None]
    scales = tl.where(tl.min(is_finite.to(tl.int32), 1) > 0, scales, float("nan"))
    steps = tl.where(is_finite, tl.minimum(tl.maximum(steps, -limit), limit), 0.0)
    if is_int:
        rounded = (steps + 12582912.0) - 12582912.0  # 1.5 * 2^23: to an integer, half to even
    else:
        rounded = round_to_float8(steps)
    tl.store(values_ptr + row * depth + ks, rounded.to(values_ptr.dtype.element_ty), mask=mask)
    tl.store(scales_ptr + row * num_groups + groups, scales, mask=groups < num_groups)


def round_activations(
    x: torch.Tensor, dtype: torch.dtype, *, group_size: int | None = None, scale: torch.Tensor | None = None
) -> RoundedActivations:
    """x [T, K] in int8 or float8_e4m3fn, each row or group of inputs by its largest magnitude, or all by scale [1]."""
    num_tokens, depth = x.shape
    x = x if x.stride(1) == 1 else x.contiguous()
    group_size = group_size or depth
    num_groups = triton.cdiv(depth, group_size)
    values = torch.empty(num_tokens, depth, dtype=dtype, device=x.device)
    scales = torch.empty(num_tokens, num_groups, dtype=torch.float32, device=x.device)
    if num_tokens == 0:
        return RoundedActivations(values, scales)
    launch = round_launch(group_size, num_groups)
    _round_activations_kernel[(num_tokens, triton.cdiv(num_groups, launch.rows))](
        x,
        values,
        scales,
        scale,
        depth,
        group_size,
        num_groups,
        x.stride(0),
        BLOCK_GROUPS=launch.rows,
        BLOCK=launch.columns,
        num_warps=launch.num_warps,
    )
    return RoundedActivations(values, scales)


def round_launch(group_size: int, num_groups: int) -> TileLaunch:
    """rows = groups of a program, columns = inputs of a group: 16 elements a thread."""
    columns = power_of_two_from(group_size)
    rows = min(max(ROUNDED_TILE_ELEMENTS // columns, 1), power_of_two_from(num_groups))
    return TileLaunch(rows, columns, min(max(rows * columns // 512, 1), 16))
