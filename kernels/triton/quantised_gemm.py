"""Products with weights of 4 and 8 bits that stay packed: dequantised in registers, for one matrix or an expert's each.

A weight's tile is the left operand, so that Hopper's wgmma takes it from registers, and tokens are its columns. A tile
of values is turned into small integers (or e4m3 / 256), which bfloat16 and float16 hold exactly; a group's sum is
scaled in float32, so no weight is rounded. What an H200 showed, and what changed since, is in `kernels/DESIGN.md`.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl

from kernels.operands import ExpertLayout
from kernels.triton.grouped_gemm import FIELDS
from kernels.triton.launch import compute_capability, num_multiprocessors, power_of_two_from
from kernels.triton.packed_quantised import PackedSteps
from kernels.triton.round_activations import RoundedActivations

# How a program finds its expert and rows: of a single matrix, by a layout's tiles, or one (token, choice) pair each.
ONE_MATRIX, BY_TILE, BY_PAIR = 0, 1, 2
_ONE_MATRIX, _BY_TILE = tl.constexpr(ONE_MATRIX), tl.constexpr(BY_TILE)
ROW_TILES_SIDE_BY_SIDE = 8
# Depths are split for few rows alone: 4,096 columns make 64 programs of up to 64 rows each, of 132 multiprocessors.
MOST_SPLIT_TILES, LEAST_SPLIT_STEPS, SUM_BLOCK = 2, 8, 1024
# A float whose lowest bits of mantissa are a small integer is the float below plus that integer: its bits and itself.
FLOAT16_BITS, FLOAT16_BASE = 0x6400, 1024.0
BFLOAT16_BITS, BFLOAT16_BASE = 0x4300, 128.0  # for 7 bits
FLOAT32_BITS, FLOAT32_BASE = 0x4B000000, 8388608.0
_FLOAT16_BITS, _FLOAT16_BASE = tl.constexpr(FLOAT16_BITS), tl.constexpr(FLOAT16_BASE)
_BFLOAT16_BITS, _BFLOAT16_BASE = tl.constexpr(BFLOAT16_BITS), tl.constexpr(BFLOAT16_BASE)
_FLOAT32_BITS, _FLOAT32_BASE = tl.constexpr(FLOAT32_BITS), tl.constexpr(FLOAT32_BASE)


@triton.jit(do_not_specialize=["num_rows", "split_steps"])
def _quantised_gemm_kernel(
    x_ptr,  # [tokens or rows, K], model dtype; int8 or float8 beside x_scales_ptr
    x_scales_ptr,  # [tokens or rows, groups of activations], float32; None: x is not rounded
    values_ptr,  # [E, N, stored bytes a row], uint8; of the dtype of a rounded x
    scales_ptr,  # [E, G, R], float32, bfloat16 or float16: each for BLOCK_ROWS rows
    zeros_ptr,  # [E, R, G], uint8; None: 8 beside 4 bits, 128 beside 8
    order_ptr,  # [E, K], int32: which element of x meets each input; None: its own
    out_ptr,  # [num_rows, N or, if GATED, N / 2], model dtype; of a depth in splits: [splits, num_rows, N], float32
    pair_ids_ptr,  # [num_rows], int64: BY_TILE and GATHER alone
    experts_ptr,  # BY_TILE: the layout's tiles, int32; BY_PAIR: the expert of each row, int64
    num_rows,
    num_columns,
    depth,
    stored_depth,
    num_groups,
    num_blocks,
    stride_x_row,
    split_steps,  # of each split of the depth
    KIND: tl.constexpr,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    BITS: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    GROUP: tl.constexpr,  # inputs a scale; 0: all
    BLOCK_ROWS: tl.constexpr,
    X_GROUPED: tl.constexpr,  # activations have a scale a group, not a row
    IS_EVEN: tl.constexpr,  # steps of BLOCK_K end where K does
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of BLOCK_M tokens of one expert and BLOCK_N rows of its weight, if GATED half of them gates and half the
    ups that go with them. Bytes of 4-bit values hold the inputs of the first half of a step, then those of the second.

    Grid: (row tiles * tiles along the weight's rows, splits)
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of the output
    HALVES: tl.constexpr = 2 if BITS == 4 else 1
    HALF_K: tl.constexpr = BLOCK_K // HALVES
    # Scales come while what is before them is multiplied; those of blocks of rows spill 24 bytes on sm_90 if kept so.
    AHEAD: tl.constexpr = BLOCK_ROWS == 1
    HALVES_END: tl.constexpr = GROUP % BLOCK_K > 0  # a group each
    SUMS: tl.constexpr = tl.int32 if x_ptr.dtype.element_ty == tl.int8 else tl.float32
    num_outputs = num_columns // 2 if GATED else num_columns
    tile_m, tile_n = _tile_of(tl.cdiv(num_outputs, COLUMNS), GROUP_M)
    expert, rows, end = _rows_of(experts_ptr, tile_m, num_rows, KIND, BLOCK_M)
    if expert < 0:
        return

    # Past the end the last row or column is computed again and not stored.
    sources = tl.minimum(rows, end - 1)
    if GATHER:
        sources = (tl.load(pair_ids_ptr + sources) if KIND == _BY_TILE else sources) // TOP_K
    sources = sources.to(tl.int64)
    places = tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(tile_n * COLUMNS + places % COLUMNS, num_outputs - 1)
    if GATED:
        weight_rows += places // COLUMNS * num_outputs
    ks, blocks = tl.arange(0, HALF_K), weight_rows // BLOCK_ROWS
    values_ptrs = values_ptr + (expert * num_columns + weight_rows)[:, None] * stored_depth + ks[None, :]
    scales_ptrs = scales_ptr + expert * num_groups * num_blocks + blocks
    split, first_step, end_step = _split_of(stored_depth // HALF_K, split_steps, KIND)
    values_ptrs += first_step * HALF_K
    scales = _scales(scales_ptrs, first_step * BLOCK_K, num_groups, num_blocks, GROUP)
    total = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUMS if GROUP == 0 else tl.float32)
    for step in range(first_step, end_step):
        stored = tl.load(values_ptrs)
        values_ptrs += HALF_K
        part = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUMS)
        for half in tl.static_range(HALVES):
            first = step * BLOCK_K + half * HALF_K
            if GROUP > 0 and (half == HALVES - 1 or HALVES_END):
                loaded = _scales(scales_ptrs, first + HALF_K if AHEAD else first, num_groups, num_blocks, GROUP)
            group = _group_of(first if HALVES_END else step * BLOCK_K, num_groups, GROUP)
            x = _activations(x_ptr + sources * stride_x_row, order_ptr, expert, ks + first, depth, IS_EVEN)
            zeros = _zeros(zeros_ptr, (expert * num_blocks + blocks) * num_groups + group, BITS)
            weight = _operand(stored, zeros, half, x.dtype, BITS, IS_FLOAT)
            if GROUP == 0 and x.dtype != tl.float8e4nv:  # whose sums wgmma keeps in fewer bits than float32's
                total = tl.dot(weight, tl.trans(x), total, input_precision="ieee", out_dtype=SUMS)
            else:
                part = tl.dot(weight, tl.trans(x), part, input_precision="ieee", out_dtype=SUMS)
            if GROUP > 0 and (half == HALVES - 1 or HALVES_END):
                scaled = part.to(tl.float32) * (scales if AHEAD else loaded).to(tl.float32)[:, None]
                total += scaled * _scale_of_activations(x_scales_ptr, sources * num_groups + group, X_GROUPED)
                part, scales = tl.zeros([BLOCK_N, BLOCK_M], dtype=SUMS), loaded
        if GROUP == 0 and x_ptr.dtype.element_ty == tl.float8e4nv:
            total += part
    total = total.to(tl.float32)
    if GROUP == 0:
        total *= tl.load(scales_ptrs).to(tl.float32)[:, None]
    total *= _scale_of_activations(x_scales_ptr, sources, not X_GROUPED and x_scales_ptr is not None)
    total *= 256.0 if IS_FLOAT and x_scales_ptr is None else 1.0
    out = tl.trans(total.to(out_ptr.dtype.element_ty))
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, COLUMNS]), (0, 2, 1)))
        out = (gate.to(tl.float32) * tl.sigmoid(gate.to(tl.float32)) * up.to(tl.float32)).to(out.dtype)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    out_ptrs = out_ptr + split * num_rows * num_outputs + rows.to(tl.int64)[:, None] * num_outputs + columns[None, :]
    tl.store(out_ptrs, out, mask=(rows < end)[:, None] & (columns < num_outputs)[None, :])


@triton.jit
def _tile_of(num_tiles_n, GROUP_M: tl.constexpr):
    """This program's tile of rows and of columns: GROUP_M tiles of rows, which read one weight, run side by side."""
    pid = tl.program_id(0)
    num_tiles_m = tl.num_programs(0) // num_tiles_n
    first_m = pid // (GROUP_M * num_tiles_n) * GROUP_M
    group_m = min(num_tiles_m - first_m, GROUP_M)
    return first_m + pid % (GROUP_M * num_tiles_n) % group_m, pid % (GROUP_M * num_tiles_n) // group_m


@triton.jit
def _split_of(num_steps, split_steps, KIND: tl.constexpr):
    """This program's split of the depth (int64), its first step, and where it ends. Of experts nothing is split.

    Where its sums go is added to a pointer: added to `rows`, it takes 22 registers more.
    """
    split, first, end = tl.cast(0, tl.int64), 0, num_steps
    if KIND == _ONE_MATRIX:
        split, first = tl.program_id(1).to(tl.int64), tl.program_id(1) * split_steps
        end = tl.minimum(first + split_steps, num_steps)
    return split, first, end


@triton.jit
def _rows_of(experts_ptr, tile_m, num_rows, KIND: tl.constexpr, BLOCK_M: tl.constexpr):
    """Of a tile of rows: its expert (int64; below 0: none), its rows, and where the expert's end."""
    expert, first, end = tl.cast(0, tl.int64), tile_m * BLOCK_M, num_rows
    if KIND == _BY_TILE:
        expert = tl.load(experts_ptr + tile_m * FIELDS).to(tl.int64)
        first, end = tl.load(experts_ptr + tile_m * FIELDS + 1), tl.load(experts_ptr + tile_m * FIELDS + 2)
    elif KIND != _ONE_MATRIX:
        expert, first, end = tl.load(experts_ptr + tile_m), tile_m, tile_m + 1
    return expert, first + tl.arange(0, BLOCK_M), end


@triton.jit
def _activations(x_rows, order_ptr, expert, inputs, depth, IS_EVEN: tl.constexpr):
    """[BLOCK_M, inputs], 0 past the depth."""
    columns = inputs
    if order_ptr is not None:
        columns = tl.load(order_ptr + expert * depth + inputs, mask=inputs < depth, other=0)
    x_ptrs = x_rows[:, None] + columns[None, :]
    return tl.load(x_ptrs) if IS_EVEN else tl.load(x_ptrs, mask=(inputs < depth)[None, :], other=0.0)


@triton.jit
def _scale_of_activations(x_scales_ptr, places, HAS_SCALE: tl.constexpr):
    """[1, BLOCK_M], or 1."""
    return tl.load(x_scales_ptr + places)[None, :] if HAS_SCALE else 1.0


@triton.jit
def _group_of(first, num_groups, GROUP: tl.constexpr):
    """The group of an input; of one past the depth the last."""
    return tl.minimum(first // GROUP, num_groups - 1) if GROUP > 0 else 0


@triton.jit
def _scales(scales_ptrs, first, num_groups, num_blocks, GROUP: tl.constexpr):
    """[BLOCK_N], of an input's group, as stored; 1 where there are no groups, whose scales are read in the end."""
    return tl.load(scales_ptrs + _group_of(first, num_groups, GROUP) * num_blocks) if GROUP > 0 else 1.0


@triton.jit
def _zeros(zeros_ptr, places, BITS: tl.constexpr):
    """Zero points [BLOCK_N, 1], float32, or the middle of the unsigned values [1, 1]."""
    if zeros_ptr is None:
        return tl.full([1, 1], 8.0 if BITS == 4 else 128.0, tl.float32)
    else:  # noqa: RET505  (Triton reads what follows a return, too)
        return tl.load(zeros_ptr + places).to(tl.float32)[:, None]


@triton.jit
def _operand(stored, zeros, half: tl.constexpr, dtype: tl.constexpr, BITS: tl.constexpr, IS_FLOAT: tl.constexpr):
    """Values less their zero points, exactly, in dtype; e4m3 is divided by 256. What is stored in dtype stays."""
    if stored.dtype == dtype:
        weight = stored
    elif IS_FLOAT:  # the bits of e4m3 within float16's, whose exponent is 8 higher
        bits = stored.to(tl.uint16)
        weight = (((bits & 0x80) << 8) | ((bits & 0x7F) << 7)).to(tl.float16, bitcast=True)
    else:
        # Of bytes one operation sets the float's upper bits and turns the sign's: theirs are all that each needs.
        SIGN: tl.constexpr = 0x80 if BITS == 8 else 0
        unsigned = stored if BITS == 8 else (stored >> (4 * half)) & 15
        if dtype == tl.float16:
            weight = (unsigned.to(tl.uint16) ^ (_FLOAT16_BITS | SIGN)).to(tl.float16, bitcast=True)
            weight -= (zeros + _FLOAT16_BASE).to(tl.float16)
        elif dtype == tl.bfloat16 and BITS == 4:
            weight = (unsigned.to(tl.uint16) ^ _BFLOAT16_BITS).to(tl.bfloat16, bitcast=True)
            weight -= (zeros + _BFLOAT16_BASE).to(tl.bfloat16)
        else:
            bits = unsigned.to(tl.uint32) ^ (_FLOAT32_BITS | SIGN)
            weight = bits.to(tl.float32, bitcast=True) - (zeros + _FLOAT32_BASE)
    return weight.to(dtype)


@triton.jit(do_not_specialize=["num_elements", "num_splits"])
def _add_splits_kernel(parts_ptr, out_ptr, num_elements, num_splits, BLOCK: tl.constexpr):
    """float32 [num_splits, num_elements] added up in order -> [num_elements], model dtype. Grid: (blocks,)."""
    places = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = places < num_elements
    total = tl.zeros([BLOCK], dtype=tl.float32)
    for _ in range(num_splits):
        total += tl.load(parts_ptr + places, mask=mask)
        parts_ptr += num_elements
    tl.store(out_ptr + places, total.to(out_ptr.dtype.element_ty), mask=mask)


@dataclass(frozen=True)
class QuantisedGemmLaunch:
    """Tile and pipeline of a product with a quantised weight; the weight's layout decides the depth of a step."""

    block_m: int  # tokens of a tile
    block_n: int  # rows of the weight of a tile
    num_warps: int
    num_stages: int

    def num_splits(self, num_programs: int, num_steps: int, num_multiprocessors: int) -> int:
        """In how many parts the depth is read, so that unsplit `num_programs` fill the GPU: 4, 2 or 1 on a
        multiprocessor, by registers. A part has at least LEAST_SPLIT_STEPS, in which a program's start is lost.
        """
        num_wanted = num_multiprocessors * (4 if self.block_m <= 32 else 2 if self.block_m == 64 else 1)
        return max(min(num_wanted // num_programs, num_steps // LEAST_SPLIT_STEPS), 1)


@dataclass(frozen=True, eq=False)
class _Rows:
    """Which rows of a product meet which expert."""

    kind: int
    num_rows: int  # of the result
    num_tiles: int
    gather: bool = False
    top_k: int = 1
    pair_ids: torch.Tensor | None = None
    experts: torch.Tensor | None = None


def quantised_linear(
    x: torch.Tensor, weight: PackedSteps, rounded: RoundedActivations | None, *, gated: bool
) -> torch.Tensor:
    """x [T, K] times a matrix [N, K] -> [T, N], or [T, N / 2] gated. rounded: x in 8 bits, in its place."""
    num_tokens = x.shape[0]
    launch = _launch_of(quantised_row_tile(num_tokens), x, weight)
    rows = _Rows(ONE_MATRIX, num_tokens, triton.cdiv(num_tokens, launch.block_m))
    return _launch(x, weight, rounded, rows, launch, gated=gated)


def quantised_grouped_gemm(
    x: torch.Tensor,
    weight: PackedSteps,
    rounded: RoundedActivations | None,
    layout: ExpertLayout,
    *,
    gather: bool,
    gated: bool,
) -> torch.Tensor:
    """See `Operations.grouped_gemm`. Raises ValueError for a layout without tiles: this package's sort makes them."""
    if layout.tiles is None:
        raise ValueError("the layout has no tiles; accepted: one that kernels.triton has sorted")
    launch = _launch_of(layout.tile_rows, x, weight)
    num_pairs = layout.pair_ids.shape[0]
    rows = _Rows(BY_TILE, num_pairs, layout.tiles.shape[0], gather, layout.top_k, layout.pair_ids, layout.tiles)
    return _launch(x, weight, rounded, rows, launch, gated=gated)


def quantised_gemm_by_pair(
    x: torch.Tensor, weight: PackedSteps, rounded: RoundedActivations | None, expert_ids: torch.Tensor, *, gated: bool
) -> torch.Tensor:
    """Row p of the result is x of pair p's token, gated, or row p of x, times the weight of its expert.

    expert_ids [T, top_k] int64, contiguous. x [T, K] gated, else [T * top_k, K].
    """
    launch = _launch_of(16, x, weight)
    num_pairs, top_k = expert_ids.numel(), expert_ids.shape[1]
    rows = _Rows(BY_PAIR, num_pairs, num_pairs, gated, top_k, None, expert_ids)
    return _launch(x, weight, rounded, rows, launch, gated=gated)


def _launch(
    x: torch.Tensor,
    weight: PackedSteps,
    rounded: RoundedActivations | None,
    rows: _Rows,
    launch: QuantisedGemmLaunch,
    *,
    gated: bool,
) -> torch.Tensor:
    scheme, (num_columns, depth) = weight.scheme, weight.shape[-2:]
    num_outputs = num_columns // 2 if gated else num_columns
    out = torch.empty(rows.num_rows, num_outputs, dtype=x.dtype, device=x.device)
    if rows.num_rows == 0:
        return out
    inputs = (x if x.stride(1) == 1 else x.contiguous()) if rounded is None else rounded.values
    num_groups, num_blocks = weight.scales.shape[-2:]
    num_programs = rows.num_tiles * triton.cdiv(num_outputs, launch.block_n // 2 if gated else launch.block_n)
    num_steps, num_splits = triton.cdiv(depth, weight.block_k), 1
    if rows.kind == ONE_MATRIX and rows.num_tiles <= MOST_SPLIT_TILES and not gated:
        num_splits = launch.num_splits(num_programs, num_steps, num_multiprocessors(x.device))
    split_steps = triton.cdiv(num_steps, num_splits)
    num_splits = triton.cdiv(num_steps, split_steps)  # none without a step
    parts = out if num_splits == 1 else out.new_empty(num_splits, *out.shape, dtype=torch.float32)
    _quantised_gemm_kernel[num_programs, num_splits](
        inputs,
        None if rounded is None else rounded.scales,
        weight.values.view(torch.uint8) if rounded is None else weight.values,
        weight.scales,
        weight.zero_points,
        weight.input_order,
        parts,
        rows.pair_ids,
        rows.experts,
        rows.num_rows,
        num_columns,
        depth,
        weight.values.shape[-1],
        num_groups,
        num_blocks,
        inputs.stride(0),
        split_steps,
        KIND=rows.kind,
        TOP_K=rows.top_k,
        GATHER=rows.gather,
        GATED=gated,
        BITS=scheme.bits,
        IS_FLOAT=scheme.is_float,
        GROUP=0 if num_groups == 1 else weight.scheme.group_size,
        BLOCK_ROWS=scheme.block_rows,
        X_GROUPED=rounded is not None and rounded.scales.shape[1] > 1,
        IS_EVEN=depth % weight.block_k == 0,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=weight.block_k,
        GROUP_M=ROW_TILES_SIDE_BY_SIDE,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    if num_splits > 1:
        grid = (triton.cdiv(out.numel(), SUM_BLOCK),)
        _add_splits_kernel[grid](parts, out, out.numel(), num_splits, BLOCK=SUM_BLOCK, num_warps=4)
    return out


def quantised_row_tile(num_tokens: int) -> int:
    """Tokens of a tile of a product with one matrix."""
    return min(max(power_of_two_from(num_tokens), 16), 128)


def quantised_row_tiles(num_tokens: int) -> tuple[int, int]:
    """Tokens of a tile, and how many tiles, those that no depth is split for as one number: they launch the same."""
    tile = quantised_row_tile(num_tokens)
    return tile, min(triton.cdiv(num_tokens, tile), MOST_SPLIT_TILES + 1)


def _launch_of(block_m: int, x: torch.Tensor, weight: PackedSteps) -> QuantisedGemmLaunch:
    return quantised_launch(block_m, x.itemsize, compute_capability(), is_reordered=weight.input_order is not None)


def quantised_launch(
    block_m: int, itemsize: int, capability: int, *, is_reordered: bool = False
) -> QuantisedGemmLaunch:
    """The launch for tiles of so many tokens.

    A tile of 16 or 32 tokens waits for the weight: 64 rows, of 4 bits 4 KiB a step, four steps on their way. Where
    inputs are reordered each warp has half as many, since with the inputs' addresses sm_80 spills 16 bytes. One of more
    multiplies; before Hopper one of 128 takes 64 rows, since 128 of float8 in blocks spill 72 bytes on sm_80.
    """
    if itemsize == 4:  # no tensor cores at full precision: a tile that plain multiply-adds can hold
        return QuantisedGemmLaunch(block_m, 32, 4 if block_m <= 32 else 8, 2)
    if block_m <= 32:
        rows, num_warps = (64, 4) if not is_reordered else (64, 8) if capability == 90 else (32, 4)
        return QuantisedGemmLaunch(block_m, rows, num_warps, 5)
    if block_m == 64:
        return QuantisedGemmLaunch(block_m, 64, 4, 3)
    return QuantisedGemmLaunch(block_m, 128 if capability == 90 else 64, 8, 3)
