"""Causal attention of ragged chunks of queries over the paged cache."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from kernels.operands import AttentionRows
from kernels.triton.attention_launch import prefill_launch
from kernels.triton.launch import compute_capability
from kernels.triton.partial_attention import (
    LOG2E,
    StoredCaches,
    add_sinks,
    attend_keys,
    load_scales,
    merge_attention_states,
    no_keys,
)
from kernels.triton.shared_prefix import attend_shared_prefixes, plan_prefill

ROWS_AT_ONCE = 256  # read by one step of a program's search for its row


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_prefill_attention`.

    The grid follows from the numbers of queries and rows, so nothing is read back from the device. Shared prefixes are
    planned once a step, attended apart and merged. With a window each tile is masked. scale must be above 0.

    Raises ValueError if the caches differ in layout, or scales and dtype do not go together.
    """
    num_queries, num_heads, head_dim = q.shape
    caches = StoredCaches.of(k_cache, v_cache, rows.kv_scales)
    output = torch.empty(q.shape, dtype=q.dtype, device=q.device)
    if num_queries == 0:
        return output
    num_kv_heads = k_cache.shape[2]
    group_size = num_heads // num_kv_heads
    is_special = caches.scales is not None or rows.soft_cap is not None or rows.window is not None
    launch = prefill_launch(head_dim, q.element_size(), compute_capability(), is_special=is_special)
    num_blocks = num_queries * group_size // launch.block_m + rows.num_rows  # see the kernel's docstring
    q = q if q.stride(2) == 1 else q.contiguous()
    plan = plan_prefill(q, num_kv_heads, rows)
    lse = None if plan is None else torch.empty(q.shape[:2], dtype=torch.float32, device=q.device)
    _prefill_kernel[num_blocks, num_kv_heads](
        *(output, lse, q, *caches, rows.block_tables, rows.cu_seqlens_q, rows.seq_lens),
        *(None if plan is None else plan.own_starts, rows.sinks),
        *(scale * LOG2E, rows.num_rows),
        *(*q.stride()[:2], *k_cache.stride()[:3], rows.block_tables.stride(0)),
        **launch.options(q.shape, k_cache.shape),
        HAS_PREFIX=plan is not None,
        WINDOW=rows.window or 0,
        SOFT_CAP=rows.soft_cap or 0.0,
        ROWS_AT_ONCE=ROWS_AT_ONCE,
    )
    if plan is None or lse is None:
        return output
    shared, shared_lse = torch.empty_like(output), torch.full_like(lse, -torch.inf)  # no key outside groups
    parts = (shared[:, :, None], shared_lse[:, :, None])
    attend_shared_prefixes(*parts, q, caches, rows, plan, scale)
    return merge_attention_states(shared, shared_lse, output, lse)


# As for decode: what varies from step to step is not specialised on; what is copied 16 bytes at a time is.
@triton.jit(
    do_not_specialize=["num_rows", "stride_block_tables_row"],
    do_not_specialize_on_alignment=[
        *("kv_scales_ptr", "block_tables_ptr", "cu_seqlens_q_ptr", "seq_lens_ptr", "own_starts_ptr", "sinks_ptr")
    ],
)
def _prefill_kernel(
    output_ptr,  # [num_queries, num_heads, HEAD_DIM], model dtype
    lse_ptr,  # [num_queries, num_heads], float32, base 2; None unless HAS_PREFIX
    q_ptr,  # [num_queries, num_heads, HEAD_DIM], model dtype
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], model dtype or bytes of e4m3
    v_cache_ptr,  # as k_cache
    kv_scales_ptr,  # [2, num_kv_heads], float32; None: not e4m3
    block_tables_ptr,  # [num_rows, max_blocks], int32
    cu_seqlens_q_ptr,  # [num_rows + 1], int32
    seq_lens_ptr,  # [num_rows], int32
    own_starts_ptr,  # [num_rows], int32: keys before are not a row's own; None unless HAS_PREFIX
    sinks_ptr,  # [num_heads], float32; None: there are none
    scale_log2e,
    num_rows,
    stride_q_token,
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
    HAS_PREFIX: tl.constexpr,
    WINDOW: tl.constexpr,  # keys that a query sees at most, its own included; 0: all up to its own
    SOFT_CAP: tl.constexpr,
    ROWS_AT_ONCE: tl.constexpr,
):
    """Attention of BLOCK_M consecutive (query, head of the group) pairs of one row and one KV head.

    Row i's blocks are numbered from cu_seqlens_q[i] * GROUP_SIZE // BLOCK_M + i on. That leaves every row room for its
    blocks without a sum over rows; numbers past a row's last block do nothing. The highest number starts first, since
    the last block of a row sees the most keys.

    Grid: (num_queries * GROUP_SIZE // BLOCK_M + num_rows, num_kv_heads).
    """
    number, kv_head = tl.num_programs(0) - 1 - tl.program_id(0), tl.program_id(1)
    row = tl.full((), -1, tl.int32)
    for first in tl.range(0, num_rows, ROWS_AT_ONCE):
        ids = first + tl.arange(0, ROWS_AT_ONCE)
        starts = tl.load(cu_seqlens_q_ptr + ids, mask=ids < num_rows, other=0) * GROUP_SIZE // BLOCK_M + ids
        row += tl.sum(((starts <= number) & (ids < num_rows)).to(tl.int32), 0)
    query_start = tl.load(cu_seqlens_q_ptr + row)
    query_len = tl.load(cu_seqlens_q_ptr + row + 1) - query_start
    first_pair = (number - query_start * GROUP_SIZE // BLOCK_M - row) * BLOCK_M
    if first_pair >= query_len * GROUP_SIZE:
        return
    num_before = tl.load(seq_lens_ptr + row) - query_len
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * stride_block_tables_row
    if HAS_PREFIX:  # whole blocks: the row's own keys are those of a shorter row
        own_start = tl.load(own_starts_ptr + row)
        num_before -= own_start
        block_table_ptr += own_start // BLOCK_SIZE
    pairs = first_pair + tl.arange(0, BLOCK_M)
    queries, heads = pairs // GROUP_SIZE, kv_head * GROUP_SIZE + pairs % GROUP_SIZE
    is_pair, num_seen = queries < query_len, num_before + queries + 1
    dims, tile = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    head_offset, is_dim = kv_head.to(tl.int64) * stride_cache_head, dims < HEAD_DIM
    q_offsets = (query_start + queries).to(tl.int64) * stride_q_token + heads * stride_q_head
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=is_pair[:, None] & is_dim[None, :], other=0.0)
    k_head_ptr, v_head_ptr = k_cache_ptr + head_offset, v_cache_ptr + head_offset
    end = num_before + tl.minimum((first_pair + BLOCK_M - 1) // GROUP_SIZE, query_len - 1) + 1  # any query's keys
    num_full = tl.maximum(num_before + first_pair // GROUP_SIZE + 1, 0) // TILE
    start = 0
    if WINDOW > 0:
        start = tl.maximum(num_before + first_pair // GROUP_SIZE + 1 - WINDOW, 0)
        num_full = 0
    k_scale, v_scale = load_scales(kv_scales_ptr, kv_head, tl.num_programs(1))
    top, mass, acc = no_keys(BLOCK_M, BLOCK_D)
    top, mass, acc = attend_keys(
        *(q, k_head_ptr, v_head_ptr, block_table_ptr, tile, start, end, num_full, num_seen, top, mass, acc),
        *(scale_log2e * k_scale, stride_cache_block, stride_cache_slot, HEAD_DIM, BLOCK_SIZE, WINDOW, SOFT_CAP),
    )
    if sinks_ptr is not None:  # in a row's own part, so that they count once where a shared prefix is merged with it
        top, mass, acc = add_sinks(sinks_ptr, heads, is_pair, top, mass, acc)
    is_empty = mass == 0.0  # no key
    mass = tl.where(is_empty, 1.0, mass)
    places = (query_start + queries).to(tl.int64) * (tl.num_programs(1) * GROUP_SIZE) + heads
    if HAS_PREFIX:
        tl.store(lse_ptr + places, tl.where(is_empty, -float("inf"), top + tl.log2(mass)), mask=is_pair)
    acc = acc / mass[:, None] * v_scale
    output_offsets = places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output_ptr + output_offsets, acc.to(output_ptr.dtype.element_ty), mask=is_pair[:, None] & is_dim[None, :])
