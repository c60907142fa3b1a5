"""Attention of one query a row over the paged cache, a row's keys split over programs ("flash decoding")."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.operands import AttentionRows
from kernels.triton.attention_launch import (
    COMBINE_NUM_WARPS,
    COMBINE_SPLITS_AT_ONCE,
    SPLIT_MULTIPLE,
    decode_launch,
    decode_splits,
    padded_head_dim,
)
from kernels.triton.launch import num_multiprocessors
from kernels.triton.partial_attention import LOG2E, LOWEST_SCORE, attend_keys
from kernels.triton.shared_prefix import attend_shared_prefixes, plan_decode

MULTIPLE = tl.constexpr(SPLIT_MULTIPLE)


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_decode_attention`.

    What is read, and how a row is split, depends on the lengths on the device alone. Those on the host size the grid
    and the room for parts; they may be bounds, as where a launch is captured once for all lengths. A row that needs one
    split writes its output itself, and is not combined.
    Shared prefixes are attended once a group, as further parts of each member. scale must be above 0.

    Raises ValueError if there are not as many queries as rows, or if the caches differ in layout.
    """
    num_rows, num_heads, head_dim = q.shape
    if num_rows != rows.num_rows:
        raise ValueError(f"q has {num_rows} queries for {rows.num_rows} rows; a decode row has exactly one")
    if k_cache.stride() != v_cache.stride() or k_cache.stride(3) != 1:
        raise ValueError(f"cache strides {k_cache.stride()} and {v_cache.stride()}; accepted: the same, the last 1")
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return output
    launch = decode_launch(q.element_size())
    q = q if q.stride(2) == 1 else q.contiguous()
    num_kv_heads = k_cache.shape[2]
    head_blocks = num_kv_heads * triton.cdiv(num_heads // num_kv_heads, launch.block_m)
    plan = plan_decode(q, num_kv_heads, rows)
    max_tokens, max_shared_parts, own_starts, shared_split_tokens = max(rows.kv_lens), 0, None, 0
    if plan is not None:
        max_tokens, max_shared_parts = plan.max_own_tokens, plan.max_parts
        own_starts, shared_split_tokens = plan.own_starts, plan.split_tokens
    splits = decode_splits(num_rows * head_blocks, max_tokens, num_multiprocessors(q.device))
    num_parts = max_shared_parts + splits.num_splits
    parts = output
    if num_parts > 1:
        parts = torch.empty((*q.shape[:2], num_parts, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((*q.shape[:2], num_parts), dtype=torch.float32, device=q.device)
    if plan is not None:
        attend_shared_prefixes(parts, lse, q, k_cache, v_cache, rows.block_tables, plan, scale)
    _decode_kernel[num_rows, head_blocks, splits.num_splits](
        *(output, parts, lse, q, k_cache, v_cache, rows.block_tables, rows.seq_lens, own_starts),
        *(scale * LOG2E, splits.min_split_tokens, shared_split_tokens, num_heads, num_parts),
        *(*q.stride()[:2], *k_cache.stride()[:3], rows.block_tables.stride(0)),
        **launch.options(q.shape, k_cache.shape),
        IS_PART=num_parts > 1,
        HAS_PREFIX=plan is not None,
    )
    if num_parts > 1:
        _combine_kernel[num_rows, num_heads](
            *(output, parts, lse, rows.seq_lens, own_starts),
            *(splits.num_splits, splits.min_split_tokens, shared_split_tokens, num_parts),
            HAS_PREFIX=plan is not None,
            HEAD_DIM=head_dim,
            BLOCK_D=padded_head_dim(head_dim),
            SPLITS_AT_ONCE=COMBINE_SPLITS_AT_ONCE,
            num_warps=COMBINE_NUM_WARPS,
        )
    return output


@triton.jit
def _store_rows(ptr, places, dims, values, mask, HEAD_DIM: tl.constexpr):
    """values [BLOCK_M, BLOCK_D] float32 to rows `places` of [.., HEAD_DIM] at ptr, in its dtype."""
    tl.store(ptr + places[:, None] * HEAD_DIM + dims[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _split_tokens(num_tokens, num_splits, min_split_tokens):
    """Keys of one split of a row with num_tokens own keys: see `DecodeSplits`."""
    return tl.maximum(tl.cdiv(tl.cdiv(num_tokens, num_splits), MULTIPLE) * MULTIPLE, min_split_tokens)


# Counts, and where a side tensor starts, vary from step to step: specialised on whether 16 divides them, a kernel would
# be compiled anew in the middle of a job. Queries and caches, copied 16 bytes at a time, are specialised on.
@triton.jit(
    do_not_specialize=["min_split_tokens", "shared_split_tokens", "num_parts", "stride_block_tables_row"],
    do_not_specialize_on_alignment=["block_tables_ptr", "seq_lens_ptr", "own_starts_ptr"],
)
def _decode_kernel(
    output_ptr,  # [num_rows, num_heads, HEAD_DIM], model dtype: of rows in one part
    part_ptr,  # [num_rows, num_heads, num_parts, HEAD_DIM], float32: of rows in several; not touched unless IS_PART
    lse_ptr,  # [num_rows, num_heads, num_parts], float32, base 2
    q_ptr,  # [num_rows, num_heads, HEAD_DIM], model dtype
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], model dtype
    v_cache_ptr,  # as k_cache
    block_tables_ptr,  # [num_rows, max_blocks], int32
    seq_lens_ptr,  # [num_rows], int32
    own_starts_ptr,  # [num_rows], int32: keys before are not a row's own; None unless HAS_PREFIX
    scale_log2e,
    min_split_tokens,
    shared_split_tokens,
    num_heads,
    num_parts,
    stride_q_row,
    stride_q_head,
    stride_cache_block,
    stride_cache_slot,
    stride_cache_head,
    stride_block_tables_row,
    GROUP_SIZE: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    BLOCK_M: tl.constexpr,
    TILE: tl.constexpr,
    IS_PART: tl.constexpr,
    HAS_PREFIX: tl.constexpr,
):
    """Attention of the query heads of one KV head over one split of a row's own keys.

    Splits past the end of a row write nothing; the only part of a row is its output. Rows run
    fastest, so that rows with the same blocks meet in the L2.
    A row's own splits follow the parts of its shared prefix, which `_shared_prefix_kernel` writes.

    Grid: (num_rows, num_kv_heads * cdiv(GROUP_SIZE, BLOCK_M), num_splits).
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    row = tl.program_id(0)
    kv_head = tl.program_id(1) // HEAD_BLOCKS
    start, end = 0, tl.load(seq_lens_ptr + row)
    part = tl.program_id(2)
    is_whole = part == 0
    if IS_PART:
        own_start = 0
        if HAS_PREFIX:
            own_start = tl.load(own_starts_ptr + row)
            part += tl.cdiv(own_start, shared_split_tokens)
        split_tokens = _split_tokens(end - own_start, tl.num_programs(2), min_split_tokens)
        start = own_start + tl.program_id(2) * split_tokens
        if (start >= end) & (tl.program_id(2) > 0):
            return
        is_whole = (part == 0) & (start + split_tokens >= end)
        end = tl.minimum(start + split_tokens, end)
    group = tl.program_id(1) % HEAD_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    heads, is_head = kv_head * GROUP_SIZE + group, group < GROUP_SIZE
    dims, tile = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    is_dim = dims < HEAD_DIM
    row64 = row.to(tl.int64)
    q_offsets = row64 * stride_q_row + heads[:, None] * stride_q_head + dims[None, :]
    q = tl.load(q_ptr + q_offsets, mask=is_head[:, None] & is_dim[None, :], other=0.0)
    head_offset = kv_head.to(tl.int64) * stride_cache_head
    k_head_ptr, v_head_ptr = k_cache_ptr + head_offset, v_cache_ptr + head_offset
    block_table_ptr = block_tables_ptr + row64 * stride_block_tables_row
    top, mass, acc = attend_keys(  # at most one tile is not full: the row's last
        *(q, k_head_ptr, v_head_ptr, block_table_ptr, tile, start, end, (end - start) // TILE, None),
        *(scale_log2e, stride_cache_block, stride_cache_slot, HEAD_DIM, BLOCK_SIZE),
    )
    is_empty = mass == 0.0  # no key
    mass = tl.where(is_empty, 1.0, mass)
    # Before `places`, or the kernel takes up to 18 registers more. For an unsplit row nobody reads it, but without the
    # store sm_90 takes 112 registers instead of 96 with 16 heads a KV head, and spills in float32.
    lse = tl.where(is_empty, -float("inf"), top + tl.log2(mass))
    places = row64 * num_heads + heads
    tl.store(lse_ptr + places * num_parts + part, lse, mask=is_head)
    acc = acc / mass[:, None]
    is_element = is_head[:, None] & is_dim[None, :]
    if IS_PART:
        if is_whole:
            _store_rows(output_ptr, places, dims, acc, is_element, HEAD_DIM)
        else:
            _store_rows(part_ptr, places * num_parts + part, dims, acc, is_element, HEAD_DIM)
    else:
        _store_rows(output_ptr, places, dims, acc, is_element, HEAD_DIM)


@triton.jit(
    do_not_specialize=["num_splits", "min_split_tokens", "shared_split_tokens", "num_parts"],
    do_not_specialize_on_alignment=["seq_lens_ptr", "own_starts_ptr"],
)
def _combine_kernel(
    output_ptr,  # [num_rows, num_heads, HEAD_DIM], model dtype
    part_ptr,  # [num_rows, num_heads, num_parts, HEAD_DIM], float32
    part_lse_ptr,  # [num_rows, num_heads, num_parts], float32, base 2
    seq_lens_ptr,  # [num_rows], int32
    own_starts_ptr,  # [num_rows], int32: keys before are a shared prefix; None unless HAS_PREFIX
    num_splits,  # of a row's own keys, at most
    min_split_tokens,
    shared_split_tokens,
    num_parts,
    HAS_PREFIX: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_D: tl.constexpr,
    SPLITS_AT_ONCE: tl.constexpr,
):
    """The parts of one row and head merged by log-sum-exp, SPLITS_AT_ONCE at a time and in rising order.

    Grid: (num_rows, num_heads).
    """
    row = tl.program_id(0)
    num_tokens, num_shared = tl.load(seq_lens_ptr + row), 0
    if HAS_PREFIX:
        own_start = tl.load(own_starts_ptr + row)
        num_tokens -= own_start
        num_shared = tl.cdiv(own_start, shared_split_tokens)
    split_tokens = _split_tokens(num_tokens, num_splits, min_split_tokens)
    num_filled = num_shared + tl.maximum(tl.cdiv(num_tokens, split_tokens), 1)
    if num_filled == 1:  # the row has written its output itself
        return
    place = row.to(tl.int64) * tl.num_programs(1) + tl.program_id(1)
    dims = tl.arange(0, BLOCK_D)
    is_dim = dims < HEAD_DIM
    top = LOWEST_SCORE + 0.0
    mass = 0.0
    acc = tl.zeros([BLOCK_D], tl.float32)
    for first in tl.range(0, num_filled, SPLITS_AT_ONCE):
        splits = first + tl.arange(0, SPLITS_AT_ONCE)
        is_filled = splits < num_filled
        part_lse = tl.load(part_lse_ptr + place * num_parts + splits, mask=is_filled, other=-float("inf"))
        offsets = (place * num_parts + splits)[:, None] * HEAD_DIM + dims[None, :]
        part = tl.load(part_ptr + offsets, mask=is_filled[:, None] & is_dim[None, :], other=0.0)
        new_top = tl.maximum(top, tl.max(part_lse, 0))
        shares = tl.exp2(part_lse - new_top)
        decay = tl.exp2(top - new_top)
        mass = mass * decay + tl.sum(shares, 0)
        acc = acc * decay + tl.sum(part * shares[:, None], 0)
        top = new_top
    is_empty = mass == 0.0  # no key
    mass = tl.where(is_empty, 1.0, mass)
    tl.store(output_ptr + place * HEAD_DIM + dims, (acc / mass).to(output_ptr.dtype.element_ty), mask=is_dim)
