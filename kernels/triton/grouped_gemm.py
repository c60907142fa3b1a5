"""Multiplies each expert's rows by its weight: the grouped matrix product and its launch parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl

from kernels.operands import ExpertLayout, PackedWeight
from kernels.triton.launch import compute_capability, power_of_two_from, tuned

SHARED_MEMORY_BYTES = {80: 166_912, 90: 232_448}
# Of every other NVIDIA GPU since Ampere (sm_86, sm_89, sm_120 have this, the others more).
LEAST_SHARED_MEMORY_BYTES = 101_376

# Of a layout's tile: expert, first row, end of the expert's rows, and one more, so that 16 bytes hold it.
TILE_FIELDS = 4
FIELDS = tl.constexpr(TILE_FIELDS)

# H200, bfloat16, E = 128, top 8, I = 768 (Qwen3-30B-A3B): number of tokens -> block_m, block_n, block_k, group_m,
# warps, stages. Tuned by vLLM (its fused_moe file "E=128,N=768,device_name=NVIDIA_H200"; SGLang ships the same) for
# both products of the layer, without swapping; both projects have since swapped below 64 rows. Ours, and measured by
# nobody: 64 to 256, where tiles of 256 columns leave a multiprocessor one program, which reads nothing while it finds
# its tile; these leave two.
_H200_TABLE = {
    1: (16, 64, 64, 1, 4, 5),
    2: (16, 64, 64, 1, 4, 4),
    4: (16, 64, 128, 16, 4, 2),
    8: (16, 64, 128, 1, 4, 3),
    16: (16, 64, 256, 1, 4, 2),
    24: (16, 64, 128, 1, 4, 4),
    32: (16, 64, 128, 16, 4, 2),
    48: (16, 128, 128, 16, 4, 3),
    64: (16, 128, 128, 1, 4, 3),
    96: (16, 128, 128, 1, 4, 3),
    128: (16, 128, 128, 1, 4, 3),
    256: (32, 128, 64, 16, 4, 4),
    512: (64, 128, 64, 1, 4, 3),
    1024: (128, 256, 64, 16, 8, 4),
    1536: (128, 256, 64, 1, 8, 4),
    2048: (128, 256, 64, 16, 8, 4),
}
# The second product from so many tokens on, if its tiles have 16 rows: it is less than half as deep, so its tiles are
# wider, for as long a loop a program. block_n, block_k, warps, stages.
_SECOND_FROM_TOKENS, _SECOND = 48, (256, 64, 8, 3)


@triton.jit
def _grouped_gemm_kernel(
    x_ptr,  # [T, K] if GATHER else [T * TOP_K, K], model dtype
    weight_ptr,  # [E, N, K], model dtype
    out_ptr,  # [T * TOP_K, N or, if GATED, N / 2], model dtype
    pair_ids_ptr,  # [T * TOP_K], int64
    tiles_ptr,  # [row tiles, FIELDS], int32: expert (-1: none), first row, end of the expert's rows
    num_columns,
    depth,
    stride_x_row,
    stride_x_depth,
    stride_weight_expert,
    stride_weight_column,
    stride_weight_depth,
    TOP_K: tl.constexpr,
    GATHER: tl.constexpr,
    GATED: tl.constexpr,
    SWAP_AB: tl.constexpr,
    HAS_TAIL: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr,
    BLOCK_K: tl.constexpr,
    GROUP_M: tl.constexpr,
):
    """One tile of BLOCK_M rows of one expert and BLOCK_N rows of its weight, if GATED half of them gates and half the
    ups that go with them. The host does not know the experts' counts: it launches programs for the worst case, and
    those whose tile has no expert return.

    Grid: (upper bound of the row tiles * tiles along the weight's rows,)
    """
    COLUMNS: tl.constexpr = BLOCK_N // 2 if GATED else BLOCK_N  # of the output
    if GATED:
        num_columns //= 2
    pid, num_tiles_n = tl.program_id(0), tl.cdiv(num_columns, COLUMNS)
    num_tiles_m = tl.num_programs(0) // num_tiles_n
    first_m = pid // (GROUP_M * num_tiles_n) * GROUP_M
    group_m = min(num_tiles_m - first_m, GROUP_M)
    tile_m = first_m + pid % (GROUP_M * num_tiles_n) % group_m
    tile_n = pid % (GROUP_M * num_tiles_n) // group_m
    expert = tl.load(tiles_ptr + tile_m * FIELDS)
    if expert < 0:
        return
    end = tl.load(tiles_ptr + tile_m * FIELDS + 2)
    rows = tl.load(tiles_ptr + tile_m * FIELDS + 1) + tl.arange(0, BLOCK_M)

    # Past the end the last row or column is computed again and not stored, so the loop needs no mask.
    sources = tl.minimum(rows, end - 1).to(tl.int64)
    if GATHER:
        sources = tl.load(pair_ids_ptr + sources) // TOP_K
    places = tl.arange(0, BLOCK_N)
    weight_rows = tl.minimum(tile_n * COLUMNS + places % COLUMNS, num_columns - 1)
    if GATED:
        weight_rows += places // COLUMNS * num_columns
    ks = tl.arange(0, BLOCK_K)
    x_ptrs = x_ptr + sources[:, None] * stride_x_row + ks[None, :] * stride_x_depth
    weight_ptrs = weight_ptr + expert.to(tl.int64) * stride_weight_expert
    weight_ptrs += weight_rows[:, None] * stride_weight_column + ks[None, :] * stride_weight_depth
    # "ieee" only concerns float32, which tensor cores would round to 10 bits of mantissa.
    total = tl.zeros([BLOCK_N, BLOCK_M] if SWAP_AB else [BLOCK_M, BLOCK_N], dtype=tl.float32)
    for _ in range(depth // BLOCK_K):
        x = tl.load(x_ptrs)
        weight = tl.load(weight_ptrs)
        if SWAP_AB:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
        x_ptrs += BLOCK_K * stride_x_depth
        weight_ptrs += BLOCK_K * stride_weight_depth
    if HAS_TAIL:
        is_tail = ks[None, :] < depth % BLOCK_K
        x = tl.load(x_ptrs, mask=is_tail, other=0.0)
        weight = tl.load(weight_ptrs, mask=is_tail, other=0.0)
        if SWAP_AB:
            total = tl.dot(weight, tl.trans(x), total, input_precision="ieee")
        else:
            total = tl.dot(x, tl.trans(weight), total, input_precision="ieee")
    out = total.to(out_ptr.dtype.element_ty)
    if SWAP_AB:
        out = tl.trans(out)
    if GATED:
        gate, up = tl.split(tl.permute(tl.reshape(out, [BLOCK_M, 2, COLUMNS]), (0, 2, 1)))
        gate = gate.to(tl.float32)
        out = (gate / (1.0 + tl.exp(-gate)) * up.to(tl.float32)).to(out_ptr.dtype.element_ty)
    columns = tile_n * COLUMNS + tl.arange(0, COLUMNS)
    out_ptrs = out_ptr + rows.to(tl.int64)[:, None] * num_columns + columns[None, :]
    tl.store(out_ptrs, out, mask=(rows < end)[:, None] & (columns < num_columns)[None, :])


@triton.jit
def write_tiles(
    tiles_ptr,  # [max_tiles, TILE_FIELDS], int32, output
    starts,  # [BLOCK_E], int32: first row of each expert
    counts,  # [BLOCK_E], int32: rows of each expert
    max_tiles,
    BLOCK_M: tl.constexpr,
):
    """The tiles of BLOCK_M rows, expert after expert: expert, first row, end of the expert's rows; -1 past the last."""
    experts = tl.arange(0, counts.shape[0])
    num_tiles = tl.cdiv(counts, BLOCK_M)
    firsts = tl.cumsum(num_tiles, 0) - num_tiles
    for index in range(tl.max(num_tiles, 0)):
        tile_ptrs = tiles_ptr + (firsts + index) * FIELDS
        is_tile = index < num_tiles
        tl.store(tile_ptrs, experts, mask=is_tile)
        tl.store(tile_ptrs + 1, starts + index * BLOCK_M, mask=is_tile)
        tl.store(tile_ptrs + 2, starts + counts, mask=is_tile)
    for first in range(tl.sum(num_tiles, 0), max_tiles, counts.shape[0]):
        tl.store(tiles_ptr + (first + experts) * FIELDS, -1, mask=first + experts < max_tiles)


def grouped_gemm(
    x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
) -> torch.Tensor:
    """See `Operations.grouped_gemm`. The gate is applied to a tile before it is written: products are rounded as
    without, so that the result is that of `silu_and_mul`.

    Raises ValueError for a layout without tiles, or with others than the launch's: this package's sort makes them.
    """
    num_pairs = layout.pair_ids.shape[0]
    num_experts, num_columns, depth = weight.shape
    num_outputs = num_columns // 2 if gated else num_columns
    out = torch.empty(num_pairs, num_outputs, dtype=x.dtype, device=x.device)
    if num_pairs == 0:
        return out
    if layout.tiles is None:
        raise ValueError("the layout has no tiles; accepted: one that kernels.triton has sorted")
    launch = grouped_gemm_launch(
        num_pairs, layout.top_k, num_experts, itemsize=x.itemsize, capability=compute_capability(), gather=gather
    )
    if launch.block_m != layout.tile_rows:
        raise ValueError(f"the layout's tiles have {layout.tile_rows} rows; accepted: the launch's {launch.block_m}")
    num_tiles_n = triton.cdiv(num_outputs, launch.block_n // 2 if gated else launch.block_n)
    _grouped_gemm_kernel[(layout.tiles.shape[0] * num_tiles_n,)](
        x,
        weight.tensor,
        out,
        layout.pair_ids,
        layout.tiles,
        num_columns,
        depth,
        *x.stride(),
        *weight.tensor.stride(),
        TOP_K=layout.top_k,
        GATHER=gather,
        GATED=gated,
        SWAP_AB=launch.swap_ab,
        HAS_TAIL=depth % launch.block_k > 0,
        BLOCK_M=launch.block_m,
        BLOCK_N=launch.block_n,
        BLOCK_K=launch.block_k,
        GROUP_M=launch.group_m,
        num_warps=launch.num_warps,
        num_stages=launch.num_stages,
    )
    return out


def row_tile(num_pairs: int, top_k: int, num_experts: int) -> int:
    """Rows of a tile, for both products of a layer: those of the nearest line that sweeps found, or a rule.

    Twice the mean number of rows an expert gets, so that most experts are one tile and their weight is read once: 256
    tokens spread evenly over 128 experts make 184 tiles of 16 rows and 128 of 32. The rule agrees with every line of
    the H200 table.
    """
    if lines := _swept(num_experts, top_k):
        return _nearest(lines, num_pairs // top_k).block_m
    return min(max(power_of_two_from(round(2 * num_pairs / num_experts)), 16), 128)


def max_row_tiles(num_pairs: int, num_experts: int, block_m: int) -> int:
    """The most tiles of block_m rows that num_pairs rows can need, however the experts share them.

    An expert with c > 0 rows needs cdiv(c, block_m) <= (c + block_m - 1) / block_m; at most num_pairs experts have any.
    """
    return (num_pairs + min(num_pairs, num_experts) * (block_m - 1)) // block_m


@dataclass(frozen=True)
class GroupedGemmLaunch:
    """Tile, order and pipeline of a grouped matrix product."""

    block_m: int  # rows of a tile, all of one expert
    block_n: int  # output features of a tile
    block_k: int  # depth of a step
    group_m: int  # tiles along m that run beside each other before the next along n
    num_warps: int
    num_stages: int
    swap_ab: bool  # multiply weight by tokens transposed: wgmma needs 64 rows, and the weight has them


def grouped_gemm_launch(
    num_pairs: int, top_k: int, num_experts: int, *, itemsize: int, capability: int, gather: bool
) -> GroupedGemmLaunch:
    """num_pairs rows in all, top_k of them a token; itemsize of the model dtype in bytes; gather: the first product."""
    num_tokens, block_m = num_pairs // top_k, row_tile(num_pairs, top_k, num_experts)
    if itemsize == 4:  # float32 has no tensor cores at full precision: a tile that plain multiply-adds can hold
        launch = GroupedGemmLaunch(block_m, 64, 32, 1, 4 if block_m <= 32 else 8, 2, swap_ab=False)
    elif lines := _swept(num_experts, top_k):
        launch = _nearest(lines, num_tokens)
    elif capability == 90 and (num_experts, top_k) == (128, 8):
        launch = _nearest({tokens: line for tokens, line in _H200_TABLE.items() if line[0] == block_m}, num_tokens)
        if not gather and block_m == 16 and num_tokens >= _SECOND_FROM_TOKENS:
            block_n, block_k, num_warps, num_stages = _SECOND
            launch = replace(launch, block_n=block_n, block_k=block_k, num_warps=num_warps, num_stages=num_stages)
    else:
        launch = _derived(num_tokens, num_pairs / num_experts, block_m, capability)
    return _within_shared_memory(launch, itemsize, capability)


def _swept(num_experts: int, top_k: int) -> Mapping[int, Sequence[int]]:
    """What sweeps on this GPU found for such layers: by number of tokens, lines as of _H200_TABLE."""
    lines = (tuned("grouped_gemm") or {}).get(f"{num_experts}, {top_k}", {})
    return {int(tokens): line for tokens, line in lines.items()}


def _nearest(table: Mapping[int, Sequence[int]], num_tokens: int) -> GroupedGemmLaunch:
    """The line for the nearest number of tokens."""
    block_m, block_n, block_k, group_m, num_warps, num_stages = table[min(table, key=lambda n: abs(n - num_tokens))]
    return GroupedGemmLaunch(block_m, block_n, block_k, group_m, num_warps, num_stages, swap_ab=block_m < 64)


def _derived(num_tokens: int, rows_per_expert: float, block_m: int, capability: int) -> GroupedGemmLaunch:
    """The launch for shapes that nobody tuned: vLLM's default for bfloat16, on Hopper triton_kernels' 256 columns."""
    group_m = 16 if rows_per_expert > 128 else 1
    if block_m == 16:
        block_n = 64 if num_tokens <= 64 else 128
        return GroupedGemmLaunch(16, block_n, 128, group_m, 4, 4, swap_ab=capability == 90)
    if block_m == 32:
        return GroupedGemmLaunch(32, 128, 128, group_m, 4, 3, swap_ab=capability == 90)
    if block_m == 64:
        return GroupedGemmLaunch(64, 128, 64, group_m, 4, 3, swap_ab=False)
    if capability == 90:
        return GroupedGemmLaunch(128, 256, 64, group_m, 8, 4, swap_ab=False)
    return GroupedGemmLaunch(128, 128, 64, group_m, 8, 3, swap_ab=False)


def _within_shared_memory(launch: GroupedGemmLaunch, itemsize: int, capability: int) -> GroupedGemmLaunch:
    stage_bytes = (launch.block_m + launch.block_n) * launch.block_k * itemsize
    limit_bytes = SHARED_MEMORY_BYTES.get(capability, LEAST_SHARED_MEMORY_BYTES)
    return replace(launch, num_stages=max(min(launch.num_stages, limit_bytes // stage_bytes), 1))
