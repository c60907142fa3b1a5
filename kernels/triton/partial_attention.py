"""Attention over the keys of a row, tile by tile, for every attention kernel, and the merge of two parts.

Of a part the kernels keep its output and its log-sum-exp to base 2, -inf where no key was seen.
"""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
import triton.language as tl

from kernels.triton.attention_launch import MERGE_NUM_WARPS, merge_block_rows, padded_head_dim

LOG2E = math.log2(math.e)
LOG2E_CONSTANT = tl.constexpr(LOG2E)
# A running maximum starts here and not at -inf: -inf - -inf would be NaN where no key was seen yet. Below every score.
LOWEST_SCORE = tl.constexpr(-3.38e38)


class StoredCaches(NamedTuple):
    """A layer's KV cache as the attention kernels take it."""

    keys: torch.Tensor  # [num_blocks, block_size, Hkv, D], model dtype, or the bytes of float8 e4m3
    values: torch.Tensor  # as keys, with the same strides
    scales: torch.Tensor | None  # [2, Hkv], float32: of keys, then of values; None: not float8

    @classmethod
    def of(cls, k_cache: torch.Tensor, v_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> StoredCaches:
        """Raises ValueError if the caches differ in layout, and for float8 without scales or scales without float8."""
        if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
            raise ValueError(f"cache strides {k_cache.stride()} and {v_cache.stride()}; accepted: the same, the last 1")
        check_scales(k_cache, v_cache, kv_scales)
        if kv_scales is None:
            return cls(k_cache, v_cache, None)
        return cls(k_cache.view(torch.uint8), v_cache.view(torch.uint8), kv_scales)


def check_scales(k_cache: torch.Tensor, v_cache: torch.Tensor, kv_scales: torch.Tensor | None) -> None:
    """Raise ValueError for a cache in float8 without scales, or scales without float8."""
    for cache in (k_cache, v_cache):
        if (cache.dtype is torch.float8_e4m3fn) != (kv_scales is not None):
            given = "without scales" if kv_scales is None else "with scales"
            raise ValueError(f"a cache in {cache.dtype} {given}; accepted: float8_e4m3fn with, others without")


@triton.jit
def _load_tile(
    k_head_ptr,  # k_cache of one head
    v_head_ptr,
    block_table_ptr,  # of one row, int32
    first,  # position in the row of the tile's first key
    tile,  # 0 .. TILE - 1
    end,  # positions from here on are no keys; without meaning where IS_FULL
    stride_cache_block,
    stride_cache_slot,
    dtype: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    IS_FULL: tl.constexpr,
    IS_ALIGNED: tl.constexpr,
):
    """Keys [BLOCK_D, TILE] and values [TILE, BLOCK_D] from `first` on, in dtype; 0 from `end` and from HEAD_DIM on.

    A full tile is loaded without a mask, so that copies of 16 bytes need no predicate. A tile that lies in one block
    needs one entry of the table, and its addresses are those of the tile before plus one number. Bytes are e4m3, which
    every model dtype holds exactly.
    """
    TILE: tl.constexpr = tile.shape[0]
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    positions = first + tile
    is_key = positions < end
    if IS_ALIGNED and BLOCK_SIZE // TILE * TILE == BLOCK_SIZE:
        offset = tl.load(block_table_ptr + first // BLOCK_SIZE).to(tl.int64) * stride_cache_block
        if TILE < BLOCK_SIZE:
            offset += first % BLOCK_SIZE * stride_cache_slot
        k_ptrs = k_head_ptr + offset + (dims[:, None] + tile[None, :] * stride_cache_slot)
        v_ptrs = v_head_ptr + offset + (dims[None, :] + tile[:, None] * stride_cache_slot)
    else:
        if IS_FULL:
            blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE).to(tl.int64)
        else:
            blocks = tl.load(block_table_ptr + positions // BLOCK_SIZE, mask=is_key, other=0).to(tl.int64)
        offsets = blocks * stride_cache_block + positions % BLOCK_SIZE * stride_cache_slot
        if k_head_ptr.dtype.element_ty == tl.uint8:  # converted in registers, where shared addresses would spill
            k_ptrs = k_head_ptr + offsets[None, :] + dims[:, None]
        else:
            k_ptrs = tl.trans(k_head_ptr + (offsets[:, None] + dims[None, :]))
        v_ptrs = v_head_ptr + (offsets[:, None] + dims[None, :])
    if not IS_FULL:
        k = tl.load(k_ptrs, mask=is_key[None, :] & is_dim[:, None], other=0)
        v = tl.load(v_ptrs, mask=is_key[:, None] & is_dim[None, :], other=0)
    elif BLOCK_D == HEAD_DIM:
        k, v = tl.load(k_ptrs), tl.load(v_ptrs)
    else:
        k = tl.load(k_ptrs, mask=is_dim[:, None], other=0)
        v = tl.load(v_ptrs, mask=is_dim[None, :], other=0)
    if k.dtype == tl.uint8:
        k, v = k.to(tl.float8e4nv, bitcast=True).to(dtype), v.to(tl.float8e4nv, bitcast=True).to(dtype)
    return k, v


@triton.jit
def load_scales(kv_scales_ptr, kv_head, num_kv_heads):
    """What the products with a KV head's keys, and its weighted values, are multiplied by; 1 without scales."""
    k_scale, v_scale = 1.0, 1.0
    if kv_scales_ptr is not None:
        k_scale, v_scale = tl.load(kv_scales_ptr + kv_head), tl.load(kv_scales_ptr + num_kv_heads + kv_head)
    return k_scale, v_scale


@triton.jit
def no_keys(BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """What `attend_keys` begins with where nothing was attended before."""
    top = tl.full([BLOCK_M], LOWEST_SCORE, tl.float32)
    return top, tl.zeros([BLOCK_M], tl.float32), tl.zeros([BLOCK_M, BLOCK_D], tl.float32)


@triton.jit
def attend_keys(
    q,  # [BLOCK_M, BLOCK_D], model dtype
    k_head_ptr,  # k_cache of one head
    v_head_ptr,
    block_table_ptr,  # of one row, int32
    tile,  # 0 .. TILE - 1
    start,
    end,
    num_full,  # tiles from start on that every query sees whole
    num_seen,  # [BLOCK_M], int32: each query sees the keys before; None: all of them
    top,  # [BLOCK_M], float32: this and the next two are what other keys came to, or `no_keys`
    mass,
    acc,
    scale_log2e,  # above 0
    stride_cache_block,
    stride_cache_slot,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    WINDOW: tl.constexpr = 0,  # of the keys before num_seen each query sees so many, the last; 0: all
    SOFT_CAP: tl.constexpr = 0.0,  # c: a score s becomes c * tanh(s / c); 0: it stays
    IS_ALIGNED: tl.constexpr = False,  # start is a multiple of TILE; such a tile lies in one block
):
    """Attention over the keys start .. end - 1 of a row: running maximum (base 2) and sum of exponentials [BLOCK_M],
    and weighted values [BLOCK_M, BLOCK_D], not yet divided by the sum.
    """
    BLOCK_D: tl.constexpr = q.shape[1]
    TILE: tl.constexpr = tile.shape[0]
    for index in tl.range(0, num_full):
        k, v = _load_tile(
            *(k_head_ptr, v_head_ptr, block_table_ptr, start + index * TILE, tile, end),
            *(stride_cache_block, stride_cache_slot, q.dtype, HEAD_DIM, BLOCK_D, BLOCK_SIZE),
            IS_FULL=True,
            IS_ALIGNED=IS_ALIGNED,
        )
        scores = tl.dot(q, k, input_precision="ieee")
        if SOFT_CAP > 0:
            top, mass, acc = _add_tile(soft_capped(scores, scale_log2e, SOFT_CAP, q.dtype), v, top, mass, acc, 1.0)
        else:
            top, mass, acc = _add_tile(scores, v, top, mass, acc, scale_log2e)
    for index in tl.range(num_full, tl.cdiv(end - start, TILE)):
        positions = start + index * TILE + tile
        k, v = _load_tile(
            *(k_head_ptr, v_head_ptr, block_table_ptr, start + index * TILE, tile, end),
            *(stride_cache_block, stride_cache_slot, q.dtype, HEAD_DIM, BLOCK_D, BLOCK_SIZE),
            IS_FULL=False,
            IS_ALIGNED=IS_ALIGNED,
        )
        scores = tl.dot(q, k, input_precision="ieee")
        if num_seen is None:
            is_seen = (positions < end)[None, :]
        else:
            is_seen = positions[None, :] < num_seen[:, None]
            if WINDOW > 0:
                is_seen &= positions[None, :] >= num_seen[:, None] - WINDOW
        if SOFT_CAP > 0:  # before the mask: a capped score is finite
            scores = soft_capped(scores, scale_log2e, SOFT_CAP, q.dtype)
            top, mass, acc = _add_tile(tl.where(is_seen, scores, -float("inf")), v, top, mass, acc, 1.0)
        else:
            scores = tl.where(is_seen, scores, -float("inf"))
            top, mass, acc = _add_tile(scores, v, top, mass, acc, scale_log2e)
    return top, mass, acc


@triton.jit
def soft_capped(scores, scale_log2e, SOFT_CAP: tl.constexpr, dtype: tl.constexpr):
    """c * tanh(s / c) of scores that are not scaled, times log2(e). In float32 near 0 by its series: 1 - e^-2x has lost
    digits there that half precision does not have.
    """
    share = scores * (scale_log2e * (1.0 / (LOG2E_CONSTANT * SOFT_CAP)))
    magnitude = tl.abs(share)
    rest = tl.exp2(magnitude * (-2.0 * LOG2E_CONSTANT))
    capped = (1.0 - rest) / (1.0 + rest)
    if dtype == tl.float32:
        square = share * share
        series = -1.0 / 3 + square * (2.0 / 15 + square * (-17.0 / 315 + square * (62.0 / 2835)))
        capped = tl.where(magnitude < 0.25, magnitude + magnitude * square * series, capped)
    return tl.where(share < 0, -capped, capped) * (SOFT_CAP * LOG2E_CONSTANT)


@triton.jit
def add_sinks(sinks_ptr, heads, mask, top, mass, acc):
    """What `attend_keys` has summed, after one more score of each head, [num_heads] float32, whose value is 0."""
    sinks = tl.load(sinks_ptr + heads, mask=mask, other=-float("inf")) * LOG2E_CONSTANT
    new_top = tl.maximum(top, sinks)
    decay = tl.exp2(top - new_top)
    return new_top, mass * decay + tl.exp2(sinks - new_top), acc * decay[:, None]


@triton.jit
def _add_tile(scores, v, top, mass, acc, scale_log2e):
    """`attend_keys` after one more tile. scores [BLOCK_M, TILE] float32, not scaled, -inf where a key is not seen."""
    new_top = tl.maximum(top, tl.max(scores, 1) * scale_log2e)
    p = tl.exp2(scores * scale_log2e - new_top[:, None])
    decay = tl.exp2(top - new_top)
    mass = mass * decay + tl.sum(p, 1)
    acc = tl.dot(p.to(v.dtype), v, acc * decay[:, None], input_precision="ieee")
    return new_top, mass, acc


def merge_attention_states(
    first_output: torch.Tensor, first_lse: torch.Tensor, second_output: torch.Tensor, second_lse: torch.Tensor
) -> torch.Tensor:
    """Output of attention over two disjoint sets of keys, from the attention over each; 0 where neither holds a key.

    Outputs [num_queries, num_heads, head_dim] in the model dtype, log-sum-exps [num_queries, num_heads] in float32.
    """
    output = torch.empty(first_output.shape, dtype=first_output.dtype, device=first_output.device)
    num_rows, head_dim = first_lse.numel(), output.shape[-1]
    if num_rows == 0:
        return output
    block_rows = merge_block_rows(head_dim)
    _merge_kernel[(triton.cdiv(num_rows, block_rows),)](
        output,
        *(tensor.contiguous() for tensor in (first_output, first_lse, second_output, second_lse)),
        num_rows,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_ROWS=block_rows,
        num_warps=MERGE_NUM_WARPS,
    )
    return output


@triton.jit(do_not_specialize=["num_rows"])
def _merge_kernel(
    output_ptr,  # [num_rows, HEAD_DIM], model dtype
    first_output_ptr,  # [num_rows, HEAD_DIM], model dtype
    first_lse_ptr,  # [num_rows], float32, base 2
    second_output_ptr,  # as first_output
    second_lse_ptr,  # as first_lse
    num_rows,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_ROWS: tl.constexpr,
):
    """BLOCK_ROWS (query, head) pairs: each output weighted with its share of the sum of exponentials.

    Grid: (cdiv(num_rows, BLOCK_ROWS),).
    """
    rows = tl.program_id(0) * BLOCK_ROWS + tl.arange(0, BLOCK_ROWS)
    dims = tl.arange(0, BLOCK_D)
    is_row = rows < num_rows
    is_element = is_row[:, None] & (dims < HEAD_DIM)[None, :]
    offsets = rows.to(tl.int64)[:, None] * HEAD_DIM + dims[None, :]
    first_lse = tl.load(first_lse_ptr + rows, mask=is_row, other=0.0)
    second_lse = tl.load(second_lse_ptr + rows, mask=is_row, other=0.0)
    # What saw no key is not read: it may be anything, and its share of 0 would make NaN of a NaN.
    is_first = is_element & (first_lse != -float("inf"))[:, None]
    is_second = is_element & (second_lse != -float("inf"))[:, None]
    first_output = tl.load(first_output_ptr + offsets, mask=is_first, other=0.0).to(tl.float32)
    second_output = tl.load(second_output_ptr + offsets, mask=is_second, other=0.0).to(tl.float32)

    top = tl.maximum(first_lse, second_lse)
    # No key on either side; -inf - -inf would be NaN. Not asked of `top`: a GPU's maximum passes over a NaN.
    is_empty = (first_lse == -float("inf")) & (second_lse == -float("inf"))
    top = tl.where(is_empty, 0.0, top)
    first_mass = tl.exp2(first_lse - top)
    second_mass = tl.exp2(second_lse - top)
    mass = tl.where(is_empty, 1.0, first_mass + second_mass)
    output = (first_output * first_mass[:, None] + second_output * second_mass[:, None]) / mass[:, None]
    output = tl.where(is_empty[:, None], 0.0, output)
    tl.store(output_ptr + offsets, output.to(output_ptr.dtype.element_ty), mask=is_element)
