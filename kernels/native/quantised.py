"""Calls native products with weights of 4 and 8 bits, which stay packed in memory."""

from __future__ import annotations

from ctypes import byref
from dataclasses import dataclass

import torch

from kernels.native.library import Kernels, PackArgs, gemm_args, round_up
from kernels.operands import ExpertLayout, PackedWeight, in_huge_pages
from kernels.quantised import QuantisedWeight

Tensor = torch.Tensor
TILE = 32  # rows and columns are filled up to multiples of it
INTEGER_DEPTH = 64  # columns, where activations are integers too
STRIP = 16  # rows of a weight that lie side by side
GROUP_STEP = 16  # inputs of a group are read by sixteens
INT4, INT8, FLOAT8, INTEGERS = 1, 2, 3, 4  # `Format` of src/quantised.h
SCALE_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}


@dataclass(frozen=True, eq=False)
class NativeQuantised(PackedWeight):
    """A quantised weight in strips of 16 rows, as src/quantised.h lays them out.

    The parts: the values, [E, bytes]; the scales, [E, strips, G, 16] in their dtype; the zero points likewise, or the
    sums of each row's values where activations are integers, or neither; then the order of inputs, or none.
    """

    format: int
    group_size: int
    has_zeros: bool = False
    input_order: Tensor | None = None  # see `QuantisedWeight`


def is_multiplied(kernels: Kernels, weight: QuantisedWeight) -> bool:
    """Whether `pack_quantised` takes the weight: others, and all where the variant has no such products, are
    `kernels.cpu`'s.

    Groups have a multiple of 16 inputs or are whole rows. Where activations are rounded to integers, which sums of
    integers alone do exactly, weights have one scale a row and no zero points. (Activations are not rounded to float8,
    which only adds precision.)
    """
    if not kernels.pack_quantised:
        return False
    is_row = weight.scales.shape[-1] == 1
    if weight.scheme.activations == "int8_token":
        return is_row and weight.scheme.symmetric and weight.scheme.bits == 8 and not weight.scheme.is_float
    return is_row or weight.group_size % GROUP_STEP == 0


def pack_quantised(kernels: Kernels, weight: QuantisedWeight) -> NativeQuantised:
    """Lay a weight [N, K] or [E, N, K] out in strips: its bytes, filled up to 32 rows and columns."""
    *_, num_rows, depth = weight.shape
    format_ = _format(weight)
    step = INTEGER_DEPTH if format_ == INTEGERS else TILE
    matrices = weight.matrices
    size = round_up(num_rows, TILE) * round_up(depth, step) * weight.scheme.bits // 8
    values = in_huge_pages(len(matrices) * size).view(len(matrices), size)
    sums = torch.zeros(len(matrices), round_up(num_rows, TILE), dtype=torch.int32)
    for matrix, out, sum_ in zip(matrices, values, sums, strict=True):
        source = matrix.values
        args = PackArgs(
            values=source.data_ptr(),
            n=num_rows,
            k=depth,
            format=format_,
            packed=out.data_ptr(),
            column_sums=sum_.data_ptr(),
        )
        kernels.pack_quantised(byref(args))
    scales = _in_strips(weight, weight.scales.float() if format_ == INTEGERS else weight.scales)
    parts = [values, scales]
    if format_ == INTEGERS:
        parts.append(sums)
    elif weight.zero_points is not None:
        parts.append(_in_strips(weight, weight.zero_points))
    if weight.input_order is not None:
        parts.append(weight.input_order)
    return NativeQuantised(
        tuple(parts), weight.shape, format_, weight.group_size, weight.zero_points is not None, weight.input_order
    )


def multiply(
    kernels: Kernels, x: Tensor, weight: NativeQuantised, layout: ExpertLayout | None, *, gather: bool, gated: bool
) -> Tensor:
    """x times a packed matrix or, with a layout, each expert's rows times the expert's matrix.

    gated: N is a multiple of 32, and the result silu(gate) * up, [.., N / 2]. Raises ValueError for an x that does not
    fit.
    """
    num_rows = _checked_rows(x, weight, layout, gather=gather)
    if weight.input_order is not None:
        x, gather = _in_order(x, weight.input_order, layout, gather=gather), False
    dtype = x.dtype
    if dtype is torch.float16:
        x = x.float()
    x = x if x.stride(1) == 1 else x.contiguous()
    values, scales, *others = weight.parts
    width = weight.shape[-2]
    out = x.new_empty(num_rows, width // 2 if gated else width)
    args = gemm_args(x, values, weight.shape, out, layout, gather=gather)
    args.format, args.is_float, args.group = weight.format, x.dtype is torch.float32, weight.group_size
    args.scales, args.scale_type, args.scale_stride = scales.data_ptr(), SCALE_TYPES[scales.dtype], scales.stride(0)
    args.zeros = others[0].data_ptr() if weight.has_zeros else None
    args.column_sums = others[0].data_ptr() if weight.format == INTEGERS else None
    kernels.gemm(byref(args))
    return out.to(dtype)


def _format(weight: QuantisedWeight) -> int:
    if weight.scheme.activations == "int8_token":
        return INTEGERS
    return FLOAT8 if weight.scheme.is_float else INT8 if weight.scheme.bits == 8 else INT4


def _in_strips(weight: QuantisedWeight, grid: Tensor) -> Tensor:
    """Scales or zero points [.., R, G] -> those of each row [E, strips, G, 16], zeros for rows that fill up a strip."""
    num_rows, num_groups = weight.shape[-2], grid.shape[-1]
    block = weight.scheme.block_rows or 1
    rows = grid.reshape(-1, *grid.shape[-2:]).repeat_interleave(block, dim=1)[:, :num_rows]
    filled = rows.new_zeros(rows.shape[0], round_up(num_rows, TILE), num_groups)
    filled[:, :num_rows] = rows
    return filled.view(rows.shape[0], -1, STRIP, num_groups).transpose(2, 3).contiguous()


def _checked_rows(x: Tensor, weight: NativeQuantised, layout: ExpertLayout | None, *, gather: bool) -> int:
    """Rows of the result. Raises ValueError."""
    if x.shape[1] != weight.shape[-1]:
        raise ValueError(f"x has {x.shape[1]} columns; accepted: {weight.shape[-1]}, as the weight has")
    if layout is None:
        return x.shape[0]
    num_pairs = layout.pair_ids.shape[0]
    expected = num_pairs // layout.top_k if gather else num_pairs
    if x.shape[0] != expected:
        raise ValueError(f"x has {x.shape[0]} rows; accepted: {expected}, as the layout has")
    return num_pairs


def _in_order(x: Tensor, order: Tensor, layout: ExpertLayout | None, *, gather: bool) -> Tensor:
    """Rows of x, gathered where they are to be, with their elements as the weight, or each expert's, takes them."""
    if layout is None:
        return x.index_select(1, order)
    rows = x.index_select(0, layout.pair_ids // layout.top_k) if gather else x
    experts = torch.repeat_interleave(layout.expert_offsets.diff(), output_size=rows.shape[0])
    return rows.gather(1, order[experts])
