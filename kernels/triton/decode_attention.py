"""Attention of one query a row over the paged cache, a row's keys split over programs ("flash decoding").

In a step that only decodes, the same kernel norms and rotates the heads and writes the new keys and values.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl

from kernels.operands import AttentionRows, ProjectedHeads
from kernels.triton.attention_launch import (
    SPLIT_MULTIPLE,
    decode_launch,
    decode_splits,
    decodes_projected,
)
from kernels.triton.launch import compute_capability, num_multiprocessors, power_of_two_from
from kernels.triton.partial_attention import (
    LOG2E,
    LOWEST_SCORE,
    StoredCaches,
    add_sinks,
    attend_keys,
    load_scales,
    no_keys,
    soft_capped,
)
from kernels.triton.rope_kv_store import check_layout, qk_norm_rope_store_kv
from kernels.triton.shared_prefix import attend_shared_prefixes, plan_decode

MULTIPLE = tl.constexpr(SPLIT_MULTIPLE)


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_decode_attention`.

    What is read, and how a row is split, depends on the lengths on the device alone. Those on the host size the grid
    and the room for parts; they may be bounds, as where a launch is captured once for all lengths. A row that needs one
    split writes its output itself; of several the program that comes last merges the parts.
    Shared prefixes are attended once a group, as further parts of each member. scale must be above 0.

    Raises ValueError if there are not as many queries as rows, if the caches differ in layout, or if scales and dtype
    do not go together.
    """
    caches = StoredCaches.of(k_cache, v_cache, rows.kv_scales)
    return _decode(q if q.stride()[1:] == (q.shape[2], 1) else q.contiguous(), caches, rows, scale, None)


def store_and_decode(heads: ProjectedHeads, rows: AttentionRows, scale: float) -> torch.Tensor:
    """See `Operations.store_and_decode`. One launch: the program that sees a row's last key norms, rotates and writes
    it, and takes it from its registers; each program rotates the queries that it takes.

    Two where rows share prefixes, whose kernel needs the queries before, with heads of which one launch would spill
    (`decodes_projected`), and with a cache in float8, so that a token is seen as rounded in its own step too. Raises
    ValueError as the operations that it stands for do.
    """
    num_kv_heads, head_dim = heads.k_cache.shape[2:]
    fits_in_one = decodes_projected(head_dim, heads.qkv.element_size(), compute_capability())
    if rows.prefix_groups or not fits_in_one or heads.kv_scales is not None:
        queries = qk_norm_rope_store_kv(*heads)
        return paged_decode_attention(queries, heads.k_cache, heads.v_cache, rows, scale)
    check_layout(qkv=heads.qkv, cos_sin=heads.cos_sin)
    every = heads.qkv.view(heads.qkv.shape[0], heads.qkv.shape[1] // head_dim, head_dim)
    caches = StoredCaches.of(heads.k_cache, heads.v_cache, rows.kv_scales)
    return _decode(every[:, : -2 * num_kv_heads], caches, rows, scale, heads)


def _decode(
    q: torch.Tensor,
    caches: StoredCaches,
    rows: AttentionRows,
    scale: float,
    heads: ProjectedHeads | None,
) -> torch.Tensor:
    """heads: where q comes from, as projected; the row's last key and value are to be taken from there and written."""
    num_rows, num_heads, head_dim = q.shape
    if num_rows != rows.num_rows:
        raise ValueError(f"q has {num_rows} queries for {rows.num_rows} rows; a decode row has exactly one")
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_rows == 0:
        return output
    kind = {"is_capped": rows.soft_cap is not None, "is_float8": caches.scales is not None}
    launch = decode_launch(head_dim, q.element_size(), compute_capability(), **kind)
    num_kv_heads = caches.keys.shape[2]
    head_blocks = num_kv_heads * triton.cdiv(num_heads // num_kv_heads, launch.block_m)
    plan = plan_decode(q, num_kv_heads, rows)
    max_tokens, max_shared_parts, own_starts, shared_split_tokens = rows.max_seen, 0, None, 0
    if plan is not None:
        max_tokens, max_shared_parts = plan.max_own_tokens, plan.max_parts
        own_starts, shared_split_tokens = plan.own_starts, plan.split_tokens
    splits = decode_splits(num_rows * head_blocks, max_tokens, num_multiprocessors(q.device))
    num_parts = max_shared_parts + splits.num_splits
    parts = output
    if num_parts > 1:
        parts = torch.empty((*q.shape[:2], num_parts, head_dim), dtype=torch.float32, device=q.device)
    lse = torch.empty((*q.shape[:2], num_parts), dtype=torch.float32, device=q.device)
    arrivals = _arrivals(q.device, power_of_two_from(num_rows * head_blocks)) if num_parts > 1 else None
    if plan is not None:
        attend_shared_prefixes(parts, lse, q, caches, rows, plan, scale)
    _decode_kernel[head_blocks, num_rows, splits.num_splits](
        *(output, parts, lse, arrivals, q, *caches, rows.block_tables, rows.seq_lens, own_starts, rows.sinks),
        *_projection(heads),
        *(scale * LOG2E, splits.min_split_tokens, shared_split_tokens, num_heads, num_parts),
        *(q.stride(0), *caches.keys.stride()[:3], rows.block_tables.stride(0)),
        **launch.options(q.shape, caches.keys.shape),
        IS_PART=num_parts > 1,
        HAS_PREFIX=plan is not None,
        WINDOW=rows.window or 0,
        SOFT_CAP=rows.soft_cap or 0.0,
        IS_PROJECTED=heads is not None,
        HAS_NORM=heads is not None and heads.qk_norm is not None,
        **launch.merge_options(num_heads // num_kv_heads, head_dim),
    )
    return output


@cache
def _arrivals(device: torch.device, size: int) -> torch.Tensor:
    """Counts of the splits of a row that are done, which each launch leaves at 0. Kept for good: graphs point to it.

    One stream of a device decodes at a time: launches beside each other would count into one another's.
    """
    return torch.zeros(size, dtype=torch.int32, device=device)


def _projection(heads: ProjectedHeads | None) -> tuple[torch.Tensor | float | None, ...]:
    """The arguments of `_decode_kernel` from query_weight_ptr to stride_cos_sin_position."""
    if heads is None:
        return (None, None, None, None, None, 0.0, 0)
    *weights, eps = (None, None, 0.0) if heads.qk_norm is None else heads.qk_norm
    return (*weights, heads.cos_sin, heads.positions, heads.slot_mapping, eps, heads.cos_sin.stride(0))


@triton.jit
def _load_rotated(
    ptrs,  # [M, BLOCK_D]: the elements of some heads of one token
    mask,  # likewise
    dims,  # [BLOCK_D]
    norm_weight_ptr,  # [HEAD_DIM], model dtype; None unless HAS_NORM
    rotation_ptr,  # [HEAD_DIM], float32: the token's cosines, then its sines
    eps,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
):
    """The heads, normed and rotated: float32 inside, rounded where `qk_norm_rope_store_kv` rounds. An element's partner
    in the rotation is loaded a second time, so that none moves between threads.
    """
    HALF: tl.constexpr = HEAD_DIM // 2
    is_dim, is_first = dims < HEAD_DIM, dims < HALF
    partners = tl.where(is_first, dims + HALF, dims - HALF)
    loaded = tl.load(ptrs, mask=mask, other=0.0)
    dtype = loaded.dtype
    own = loaded.to(tl.float32)
    partner = tl.load(ptrs + (partners - dims)[None, :], mask=mask, other=0.0).to(tl.float32)
    if HAS_NORM:
        inverse_rms = tl.rsqrt(tl.sum(own * own, axis=1, keep_dims=True) / HEAD_DIM + eps)
        own_weight = tl.load(norm_weight_ptr + dims, mask=is_dim, other=0.0).to(tl.float32)
        partner_weight = tl.load(norm_weight_ptr + partners, mask=is_dim, other=0.0).to(tl.float32)
        own = ((own * inverse_rms).to(dtype).to(tl.float32) * own_weight[None, :]).to(dtype).to(tl.float32)
        partner = ((partner * inverse_rms).to(dtype).to(tl.float32) * partner_weight[None, :]).to(dtype).to(tl.float32)
    angles = tl.where(is_first, dims, partners)
    cos = tl.load(rotation_ptr + angles, mask=is_dim, other=0.0)[None, :]
    sin = tl.load(rotation_ptr + HALF + angles, mask=is_dim, other=0.0)[None, :]
    return tl.where(is_first[None, :], own * cos - partner * sin, own * cos + partner * sin).to(dtype)


@triton.jit
def _divided(top, mass, acc):
    """Log-sum-exp (base 2) and values of what `attend_keys` returns; -inf and 0 where there was no key."""
    is_empty = mass == 0.0
    mass = tl.where(is_empty, 1.0, mass)
    return tl.where(is_empty, -float("inf"), top + tl.log2(mass)), acc / mass[:, None]


@triton.jit
def _store_token(
    q,  # [BLOCK_M, BLOCK_D], the queries of the head
    k_ptrs,  # [1, BLOCK_D]: one KV head's key as projected
    value_offset,  # its value, from there
    is_new,  # whether this program sees the row's last token
    is_storing,  # and is the one that stores it
    dims,
    norm_weight_ptr,  # this and the next two: as of `_load_rotated`
    rotation_ptr,
    eps,
    k_head_ptr,  # k_cache of the head
    v_head_ptr,
    slot,  # below 0: nowhere
    stride_cache_block,
    stride_cache_slot,
    scale_log2e,
    HAS_NORM: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    BLOCK_SIZE: tl.constexpr,
    SOFT_CAP: tl.constexpr,
):
    """Store the row's last key, normed and rotated, and value of one head; what `attend_keys` begins with after it."""
    mask = is_new & (dims < HEAD_DIM)[None, :]
    k = _load_rotated(k_ptrs, mask, dims, norm_weight_ptr, rotation_ptr, eps, HAS_NORM, HEAD_DIM)
    v = tl.load(k_ptrs + value_offset, mask=mask, other=0.0)
    place = slot // BLOCK_SIZE * stride_cache_block + slot % BLOCK_SIZE * stride_cache_slot + dims[None, :]
    tl.store(k_head_ptr + place, k, mask=mask & is_storing & (slot >= 0))
    tl.store(v_head_ptr + place, v, mask=mask & is_storing & (slot >= 0))
    scores = tl.sum(q.to(tl.float32) * k.to(tl.float32), axis=1)
    if SOFT_CAP > 0:
        scores = soft_capped(scores, scale_log2e, SOFT_CAP, q.dtype)
    else:
        scores *= scale_log2e
    top = tl.where(is_new, scores, LOWEST_SCORE)
    mass = tl.where(is_new, tl.full([q.shape[0]], 1.0, tl.float32), 0.0)
    return top, mass, tl.broadcast_to(tl.where(is_new, v.to(tl.float32), 0.0), [q.shape[0], q.shape[1]])


@triton.jit
def _store_rows(ptr, places, dims, values, mask, HEAD_DIM: tl.constexpr):
    """values [BLOCK_M, BLOCK_D] float32 to rows `places` of [.., HEAD_DIM] at ptr, in its dtype."""
    tl.store(ptr + places[:, None] * HEAD_DIM + dims[None, :], values.to(ptr.dtype.element_ty), mask=mask)


@triton.jit
def _first_seen(num_tokens, WINDOW: tl.constexpr):
    """The first key that a row's query sees."""
    first = 0
    if WINDOW > 0:
        first = tl.maximum(num_tokens - WINDOW, 0)
    return first


@triton.jit
def _split(
    own_starts_ptr,
    row,
    first_seen,
    num_tokens,
    min_split_tokens,
    shared_split_tokens,
    HAS_PREFIX: tl.constexpr,
):
    """First key of this program's split and the one past its last; the row's splits; the part that this is, of all."""
    own_start, num_shared = first_seen, 0
    if HAS_PREFIX:
        own_start = tl.load(own_starts_ptr + row)
        num_shared = tl.cdiv(own_start, shared_split_tokens)
    num_tokens -= own_start
    split_tokens = tl.maximum(tl.cdiv(tl.cdiv(num_tokens, tl.num_programs(2)), MULTIPLE) * MULTIPLE, min_split_tokens)
    start = tl.program_id(2) * split_tokens
    end = own_start + tl.minimum(start + split_tokens, num_tokens)
    num_splits = tl.maximum(tl.cdiv(num_tokens, split_tokens), 1)
    return own_start + start, end, num_splits, num_shared + tl.program_id(2), num_shared + num_splits


# Counts, and where a side tensor starts, vary from step to step: specialised on whether 16 divides them, a kernel would
# be compiled anew in the middle of a job. Queries and caches, copied 16 bytes at a time, are specialised on.
@triton.jit(
    do_not_specialize=["min_split_tokens", "shared_split_tokens", "num_parts", "stride_block_tables_row"],
    do_not_specialize_on_alignment=[
        *("kv_scales_ptr", "block_tables_ptr", "seq_lens_ptr", "own_starts_ptr", "sinks_ptr"),
        *("positions_ptr", "slot_mapping_ptr"),
    ],
)
def _decode_kernel(
    output_ptr,  # [num_rows, num_heads, HEAD_DIM], model dtype: of rows in one part
    part_ptr,  # [num_rows, num_heads, num_parts, HEAD_DIM], float32: of rows in several; not touched unless IS_PART
    lse_ptr,  # [num_rows, num_heads, num_parts], float32, base 2
    arrivals_ptr,  # [num_rows, num_programs(0)], int32: 0 before and after; None unless IS_PART
    q_ptr,  # [num_rows, num_heads, HEAD_DIM], model dtype; if IS_PROJECTED a row's keys and values follow
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], model dtype (written if IS_PROJECTED) or e4m3
    v_cache_ptr,  # as k_cache
    kv_scales_ptr,  # [2, num_kv_heads], float32; None: not e4m3. Not with IS_PROJECTED
    block_tables_ptr,  # [num_rows, max_blocks], int32
    seq_lens_ptr,  # [num_rows], int32
    own_starts_ptr,  # [num_rows], int32: keys before are not a row's own; None unless HAS_PREFIX
    sinks_ptr,  # [num_heads], float32; None: there are none
    query_weight_ptr,  # [HEAD_DIM], model dtype; this and the next None unless HAS_NORM
    key_weight_ptr,  # likewise
    cos_sin_ptr,  # [max_positions, HEAD_DIM], float32; this and the next two None unless IS_PROJECTED
    positions_ptr,  # [num_rows], int64
    slot_mapping_ptr,  # [num_rows], int64
    eps,
    stride_cos_sin_position,
    scale_log2e,
    min_split_tokens,
    shared_split_tokens,
    num_heads,
    num_parts,
    stride_q_row,
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
    WINDOW: tl.constexpr,  # keys of a row that are seen, the last ones; 0: all. Not with HAS_PREFIX
    SOFT_CAP: tl.constexpr,
    IS_PROJECTED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    MERGED_HEADS: tl.constexpr,  # heads of a program, rounded up to a power of two
    PARTS_AT_ONCE: tl.constexpr,
):
    """Attention of the query heads of one KV head over one split of a row's own keys.

    Splits past the end of a row write nothing; the only part of a row is its output. Of several parts, which follow
    those of a shared prefix that `_shared_prefix_kernel` has written, the program that comes last merges all. Heads run
    fastest: a block's keys of all KV heads lie side by side in memory.

    Grid: (num_kv_heads * cdiv(GROUP_SIZE, BLOCK_M), num_rows, num_splits).
    """
    HEAD_BLOCKS: tl.constexpr = (GROUP_SIZE + BLOCK_M - 1) // BLOCK_M
    row, kv_head = tl.program_id(1).to(tl.int64), (tl.program_id(0) // HEAD_BLOCKS).to(tl.int64)
    num_tokens = tl.load(seq_lens_ptr + row)
    start, end, num_splits, part, num_filled = _first_seen(num_tokens, WINDOW), num_tokens, 1, 0, 1
    if IS_PART:
        start, end, num_splits, part, num_filled = _split(
            own_starts_ptr, row, start, num_tokens, min_split_tokens, shared_split_tokens, HAS_PREFIX
        )
        if tl.program_id(2) >= num_splits:
            return
    group = tl.program_id(0) % HEAD_BLOCKS * BLOCK_M + tl.arange(0, BLOCK_M)
    heads, is_head = kv_head * GROUP_SIZE + group, group < GROUP_SIZE
    dims, tile = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    is_element = is_head[:, None] & (dims < HEAD_DIM)[None, :]
    q_ptrs = q_ptr + row * stride_q_row + heads[:, None] * HEAD_DIM + dims[None, :]
    k_head_ptr, v_head_ptr = k_cache_ptr + kv_head * stride_cache_head, v_cache_ptr + kv_head * stride_cache_head
    k_scale, v_scale = load_scales(kv_scales_ptr, kv_head, num_heads // GROUP_SIZE)
    if IS_PROJECTED:
        rotation_ptr = cos_sin_ptr + tl.load(positions_ptr + row) * stride_cos_sin_position
        q = _load_rotated(q_ptrs, is_element, dims, query_weight_ptr, rotation_ptr, eps, HAS_NORM, HEAD_DIM)
        is_last = (end == num_tokens) & (end > start)
        end -= is_last.to(tl.int32)  # the last key is not in the cache yet
        k_ptrs = q_ptr + row * stride_q_row + (num_heads + kv_head) * HEAD_DIM + dims[None, :]
        top, mass, acc = _store_token(
            *(q, k_ptrs, num_heads // GROUP_SIZE * HEAD_DIM, is_last, tl.program_id(0) % HEAD_BLOCKS == 0, dims),
            *(key_weight_ptr, rotation_ptr, eps, k_head_ptr, v_head_ptr, tl.load(slot_mapping_ptr + row)),
            *(stride_cache_block, stride_cache_slot, scale_log2e, HAS_NORM, HEAD_DIM, BLOCK_SIZE, SOFT_CAP),
        )
    else:
        q = tl.load(q_ptrs, mask=is_element, other=0.0)
        top, mass, acc = no_keys(BLOCK_M, BLOCK_D)
    top, mass, acc = attend_keys(  # at most one tile is not full: the row's last
        *(q, k_head_ptr, v_head_ptr, block_tables_ptr + row * stride_block_tables_row, tile, start, end),
        *((end - start) // TILE, None, top, mass, acc, scale_log2e * k_scale, stride_cache_block, stride_cache_slot),
        *(HEAD_DIM, BLOCK_SIZE, 0, SOFT_CAP, WINDOW == 0 and MULTIPLE // TILE * TILE == MULTIPLE),
    )
    if sinks_ptr is not None:  # those of a row of several parts are added where these are merged
        top, mass, acc = add_sinks(sinks_ptr, heads, is_head & (num_filled == 1), top, mass, acc)
    lse, acc = _divided(top, mass, acc)
    places = row * num_heads + heads
    if num_filled == 1:
        _store_rows(output_ptr, places, dims, acc * v_scale, is_element, HEAD_DIM)
    elif IS_PART:
        tl.store(lse_ptr + places * num_parts + part, lse, mask=is_head)
        _store_rows(part_ptr, places * num_parts + part, dims, acc * v_scale, is_element, HEAD_DIM)
        if _is_last(arrivals_ptr + row * tl.num_programs(0) + tl.program_id(0), num_splits):
            first_head = kv_head * GROUP_SIZE + tl.program_id(0) % HEAD_BLOCKS * BLOCK_M
            _merge_parts(
                *(output_ptr, part_ptr, lse_ptr, sinks_ptr, row * num_heads, first_head, (kv_head + 1) * GROUP_SIZE),
                *(dims, num_filled, num_parts, MERGED_HEADS, HEAD_DIM, PARTS_AT_ONCE),
            )


@triton.jit
def _is_last(arrivals_ptr, num_splits):
    """Count this program among the row's; whether it is the last, which leaves the count at 0 for the next launch.

    All of the program has written before its arrival is counted, which releases and acquires.
    """
    tl.debug_barrier()
    is_last = tl.atomic_add(arrivals_ptr, 1, sem="acq_rel", scope="gpu") == num_splits - 1
    if is_last:
        tl.debug_barrier()
        tl.store(arrivals_ptr, 0)
    return is_last


@triton.jit
def _merge_parts(
    output_ptr,  # this and the next three as of `_decode_kernel`
    part_ptr,
    lse_ptr,
    sinks_ptr,
    row_start,  # int64: among all heads of all rows the row's first
    first_head,  # of those that are merged
    end_head,
    dims,  # [BLOCK_D]
    num_filled,  # parts of the row
    num_parts,
    HEADS: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    PARTS_AT_ONCE: tl.constexpr,
):
    """Output of some heads of a row: its parts merged by log-sum-exp, PARTS_AT_ONCE at a time and in rising order."""
    heads = first_head + tl.arange(0, HEADS)
    is_head, is_dim = heads < end_head, dims < HEAD_DIM
    top, mass, acc = no_keys(HEADS, dims.shape[0])
    for first in tl.range(0, num_filled, PARTS_AT_ONCE):
        parts = first + tl.arange(0, PARTS_AT_ONCE)
        is_part = (parts < num_filled)[:, None] & is_head[None, :]
        places = (row_start + heads)[None, :] * num_parts + parts[:, None]
        lse = tl.load(lse_ptr + places, mask=is_part, other=-float("inf"))
        is_element = is_part[:, :, None] & is_dim[None, None, :]
        part = tl.load(part_ptr + places[:, :, None] * HEAD_DIM + dims[None, None, :], mask=is_element, other=0.0)
        new_top = tl.maximum(top, tl.max(lse, 0))
        shares = tl.exp2(lse - new_top[None, :])
        decay = tl.exp2(top - new_top)
        mass = mass * decay + tl.sum(shares, 0)
        acc = acc * decay[:, None] + tl.sum(part * shares[:, :, None], 0)
        top = new_top
    if sinks_ptr is not None:
        top, mass, acc = add_sinks(sinks_ptr, heads, is_head, top, mass, acc)
    _, acc = _divided(top, mass, acc)
    _store_rows(output_ptr, row_start + heads, dims, acc, is_head[:, None] & is_dim[None, :], HEAD_DIM)
