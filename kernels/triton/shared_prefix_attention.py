"""Attention over keys that several rows share: each key read once for all of their queries (Hydragen, 2402.05099)."""

from __future__ import annotations

import math

import torch
import triton
import triton.language as tl

from kernels.triton.attention_launch import padded_head_dim
from kernels.triton.attention_tile import LOWEST_SCORE, add_tile, load_tile
from kernels.triton.shared_prefix_plan import SharedPrefixPlan

LOG2E = math.log2(math.e)
LN2 = tl.constexpr(math.log(2.0))


def attend_shared_prefixes(
    output: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    block_tables: torch.Tensor,
    plan: SharedPrefixPlan,
    scale: float,
) -> None:
    """Write the attention of the groups' queries over their prefixes; leave what belongs to other rows alone.

    output [num_queries, num_heads, num_parts, head_dim] and lse [num_queries, num_heads, num_parts], contiguous; the
    parts of a prefix are the first of its rows'. float32 and in base 2 where there are several parts; where there is
    one, the plan splits no prefix, output is of the model dtype and lse natural.
    q [num_queries, num_heads, head_dim] with a last stride of 1; caches and block_tables as in `AttentionRows`.
    """
    num_heads, num_parts, head_dim = output.shape[1:]
    num_kv_heads = k_cache.shape[2]
    _shared_prefix_kernel[plan.programs.shape[0], num_kv_heads](
        *(output, lse, q, k_cache, v_cache, block_tables, plan.programs),
        *(scale * LOG2E, num_heads, num_parts),
        *(*q.stride()[:2], *k_cache.stride()[:3], block_tables.stride(0)),
        GROUP_SIZE=num_heads // num_kv_heads,
        HEAD_DIM=head_dim,
        BLOCK_D=padded_head_dim(head_dim),
        BLOCK_SIZE=k_cache.shape[1],
        BLOCK_M=plan.launch.block_m,
        TILE=plan.launch.tile,
        IS_PART=num_parts > 1,
        num_warps=plan.launch.num_warps,
        num_stages=plan.launch.num_stages,
    )


# As for decode: what varies from step to step is not specialised on; what is copied 16 bytes at a time is.
@triton.jit(
    do_not_specialize=["num_parts", "stride_block_tables_row"],
    do_not_specialize_on_alignment=["block_tables_ptr", "programs_ptr"],
)
def _shared_prefix_kernel(
    output_ptr,  # [num_queries, num_heads, num_parts, HEAD_DIM], dtype of q, or float32 where IS_PART
    lse_ptr,  # [num_queries, num_heads, num_parts], float32; natural, or base 2 where IS_PART
    q_ptr,  # [num_queries, num_heads, HEAD_DIM], model dtype
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], model dtype
    v_cache_ptr,  # as k_cache
    block_tables_ptr,  # [num_rows, max_blocks], int32
    programs_ptr,  # [num_programs, 6], int32: row, first pair, end of the queries, start and end of the keys, part
    scale_log2e,
    num_heads,
    num_parts,
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
    IS_PART: tl.constexpr,
):
    """Attention of BLOCK_M consecutive (query, head of the group) pairs over keys that all of them see.

    Queries of several rows are neighbours, so a block goes on from one row's to the next's. Pairs are counted from
    query 0; the keys, at least one, are those of the program's row.

    Grid: (num_programs, num_kv_heads).
    """
    program_ptr, kv_head = programs_ptr + tl.program_id(0) * 6, tl.program_id(1)
    row, first_pair, query_end = tl.load(program_ptr), tl.load(program_ptr + 1), tl.load(program_ptr + 2)
    start, end, part = tl.load(program_ptr + 3), tl.load(program_ptr + 4), tl.load(program_ptr + 5)
    pairs = first_pair + tl.arange(0, BLOCK_M)
    queries, heads = pairs // GROUP_SIZE, kv_head * GROUP_SIZE + pairs % GROUP_SIZE
    dims, tile = tl.arange(0, BLOCK_D), tl.arange(0, TILE)
    is_element = (queries < query_end)[:, None] & (dims < HEAD_DIM)[None, :]
    q_offsets = queries.to(tl.int64) * stride_q_token + heads * stride_q_head
    q = tl.load(q_ptr + q_offsets[:, None] + dims[None, :], mask=is_element, other=0.0)
    head_offset = kv_head.to(tl.int64) * stride_cache_head
    k_head_ptr, v_head_ptr = k_cache_ptr + head_offset, v_cache_ptr + head_offset
    block_table_ptr = block_tables_ptr + row.to(tl.int64) * stride_block_tables_row
    top = tl.full([BLOCK_M], LOWEST_SCORE, tl.float32)
    mass = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    num_full = (end - start) // TILE
    for index in tl.range(0, num_full):
        k, v = load_tile(
            *(k_head_ptr, v_head_ptr, block_table_ptr, start + index * TILE + tile, end),
            *(stride_cache_block, stride_cache_slot, HEAD_DIM, BLOCK_D, BLOCK_SIZE),
            IS_FULL=True,
        )
        scores = tl.dot(q, k, input_precision="ieee")
        top, mass, acc = add_tile(scores, v, top, mass, acc, scale_log2e)
    for index in tl.range(num_full, tl.cdiv(end - start, TILE)):  # at most one: a prefix ends with a block
        positions = start + index * TILE + tile
        k, v = load_tile(
            *(k_head_ptr, v_head_ptr, block_table_ptr, positions, end),
            *(stride_cache_block, stride_cache_slot, HEAD_DIM, BLOCK_D, BLOCK_SIZE),
            IS_FULL=False,
        )
        scores = tl.where((positions < end)[None, :], tl.dot(q, k, input_precision="ieee"), -float("inf"))
        top, mass, acc = add_tile(scores, v, top, mass, acc, scale_log2e)
    places = (queries.to(tl.int64) * num_heads + heads) * num_parts + part
    lse = top + tl.log2(mass)
    tl.store(lse_ptr + places, lse if IS_PART else lse * LN2, mask=queries < query_end)
    acc = acc / mass[:, None]
    output_ptrs = output_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=is_element)
