"""Attention over keys that several rows share: each key read once for all of their queries (Hydragen, 2402.05099).

The programs over the shared prefixes of a step are planned once and serve every layer.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate, chain

import torch
import triton
import triton.language as tl

from kernels.operands import AttentionRows, PrefixGroup
from kernels.triton.attention_launch import (
    AttentionLaunch,
    prefill_launch,
    saves_blocks,
    shared_prefix_launch,
    shared_prefix_split_tokens,
)
from kernels.triton.launch import compute_capability, num_multiprocessors
from kernels.triton.partial_attention import LOG2E, StoredCaches, attend_keys, load_scales, no_keys

# Blocks of 16 are for decode: most chunks have more pairs, and at 256 dims the kernel that writes no parts spills.
_MIN_CHUNK_PAIRS = 17


@dataclass(frozen=True, eq=False)
class SharedPrefixPlan:
    """The programs that attend to the keys groups share, and what they leave to the rows."""

    launch: AttentionLaunch  # of the kernel over the shared keys
    programs: torch.Tensor  # [num_programs, 6], int32: see `_shared_prefix_kernel`
    own_starts: torch.Tensor  # [num_rows], int32: the keys before are left to the row's group; 0 outside groups
    split_tokens: int  # shared keys of a part
    max_parts: int  # parts of the longest prefix
    max_own_tokens: int  # keys of the row with the most keys from its own start on

    @classmethod
    def build(
        cls,
        rows: AttentionRows,
        groups: Sequence[PrefixGroup],
        heads_per_kv_head: int,
        launch: AttentionLaunch,
        split_tokens: int,
    ) -> SharedPrefixPlan:
        """One upload, from pinned memory and without a sync: 4 bytes a row and 24 a program."""
        query_starts = [0, *accumulate(rows.query_lens)]
        own_starts = [0] * rows.num_rows
        programs: list[tuple[int, ...]] = []
        for first_row, num_rows, num_tokens in groups:
            end_row = first_row + num_rows
            own_starts[first_row:end_row] = [num_tokens] * num_rows
            query_end = query_starts[end_row]
            pairs = range(query_starts[first_row] * heads_per_kv_head, query_end * heads_per_kv_head, launch.block_m)
            for part, start in enumerate(range(0, num_tokens, split_tokens)):  # programs of the same keys side by side
                end = min(start + split_tokens, num_tokens)
                programs += [(first_row, first_pair, query_end, start, end, part) for first_pair in pairs]
        device = rows.seq_lens.device
        table = torch.tensor(
            [*own_starts, *chain.from_iterable(programs)], dtype=torch.int32, pin_memory=device.type == "cuda"
        ).to(device, non_blocking=True)
        return cls(
            launch=launch,
            programs=table[rows.num_rows :].view(-1, 6),
            own_starts=table[: rows.num_rows],
            split_tokens=split_tokens,
            max_parts=max(-(-group.num_tokens // split_tokens) for group in groups),
            max_own_tokens=max(kv_len - start for kv_len, start in zip(rows.kv_lens, own_starts, strict=True)),
        )


def plan_decode(q: torch.Tensor, num_kv_heads: int, rows: AttentionRows) -> SharedPrefixPlan | None:
    """The plan for rows of one query, prefixes split over programs; None where no rows share any.

    q [num_rows, num_heads, head_dim].
    """
    num_heads, head_dim = q.shape[1:]
    heads_per_kv_head = num_heads // num_kv_heads

    def make() -> SharedPrefixPlan:
        num_pairs = [group.num_rows * heads_per_kv_head for group in rows.prefix_groups]
        launch = shared_prefix_launch(max(num_pairs), head_dim, q.element_size(), compute_capability())
        num_programs = num_kv_heads * sum(-(-count // launch.block_m) for count in num_pairs)
        max_tokens = max(group.num_tokens for group in rows.prefix_groups)
        split_tokens = shared_prefix_split_tokens(
            launch.block_m, num_programs, max_tokens, num_multiprocessors(q.device)
        )
        return SharedPrefixPlan.build(rows, rows.prefix_groups, heads_per_kv_head, launch, split_tokens)

    if not rows.prefix_groups:
        return None
    return rows.once(("shared_prefix_decode", num_kv_heads, num_heads, head_dim, q.element_size()), make)


def plan_prefill(q: torch.Tensor, num_kv_heads: int, rows: AttentionRows) -> SharedPrefixPlan | None:
    """The plan for chunks, no prefix split; None where no group's queries need fewer programs together than apart.

    q [num_queries, num_heads, head_dim].
    """
    num_heads, head_dim = q.shape[1:]
    heads_per_kv_head = num_heads // num_kv_heads

    def make() -> SharedPrefixPlan | None:
        options = (head_dim, q.element_size(), compute_capability())
        block_m, groups, max_pairs = prefill_launch(*options, is_special=True).block_m, [], _MIN_CHUNK_PAIRS
        for group in rows.prefix_groups:
            query_lens = rows.query_lens[group.first_row : group.first_row + group.num_rows]
            num_pairs = [query_len * heads_per_kv_head for query_len in query_lens]
            if saves_blocks(num_pairs, block_m):
                groups.append(group)
                max_pairs = max(max_pairs, sum(num_pairs))
        if not groups:
            return None
        launch = shared_prefix_launch(max_pairs, *options)
        split_tokens = max(group.num_tokens for group in groups)
        return SharedPrefixPlan.build(rows, groups, heads_per_kv_head, launch, split_tokens)

    if not rows.prefix_groups:
        return None
    return rows.once(("shared_prefix_prefill", num_kv_heads, num_heads, head_dim, q.element_size()), make)


def attend_shared_prefixes(
    output: torch.Tensor,
    lse: torch.Tensor,
    q: torch.Tensor,
    caches: StoredCaches,
    rows: AttentionRows,
    plan: SharedPrefixPlan,
    scale: float,
) -> None:
    """Write the attention of the groups' queries over their prefixes; leave what belongs to other rows alone.

    output [num_queries, num_heads, num_parts, head_dim] and lse [num_queries, num_heads, num_parts], contiguous; the
    parts of a prefix are the first of its rows'. lse is float32, to base 2; output float32, or of the model dtype where
    there is one part and the plan splits no prefix.
    q [num_queries, num_heads, head_dim] with a last stride of 1. Sinks are left to what the rows see beside it.
    """
    num_heads, num_parts = output.shape[1:3]
    _shared_prefix_kernel[plan.programs.shape[0], caches.keys.shape[2]](
        *(output, lse, q, *caches, rows.block_tables, plan.programs),
        *(scale * LOG2E, num_heads, num_parts),
        *(*q.stride()[:2], *caches.keys.stride()[:3], rows.block_tables.stride(0)),
        **plan.launch.options(q.shape, caches.keys.shape),
        SOFT_CAP=rows.soft_cap or 0.0,
    )


# As for decode: what varies from step to step is not specialised on; what is copied 16 bytes at a time is.
@triton.jit(
    do_not_specialize=["num_parts", "stride_block_tables_row"],
    do_not_specialize_on_alignment=["kv_scales_ptr", "block_tables_ptr", "programs_ptr"],
)
def _shared_prefix_kernel(
    output_ptr,  # [num_queries, num_heads, num_parts, HEAD_DIM], float32 or dtype of q
    lse_ptr,  # [num_queries, num_heads, num_parts], float32, base 2
    q_ptr,  # [num_queries, num_heads, HEAD_DIM], model dtype
    k_cache_ptr,  # [num_blocks, BLOCK_SIZE, num_kv_heads, HEAD_DIM], model dtype or bytes of e4m3
    v_cache_ptr,  # as k_cache
    kv_scales_ptr,  # [2, num_kv_heads], float32; None: not e4m3
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
    SOFT_CAP: tl.constexpr,
):
    """Attention of BLOCK_M consecutive (query, head of the group) pairs over keys that all of them see.

    A block goes on from the queries of one row to those of the next. Pairs are counted from query 0; the keys, at least
    one, are those of the program's row.

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
    k_scale, v_scale = load_scales(kv_scales_ptr, kv_head, tl.num_programs(1))
    top, mass, acc = no_keys(BLOCK_M, BLOCK_D)
    top, mass, acc = attend_keys(  # at most one tile is not full: a prefix ends with a block
        *(q, k_head_ptr, v_head_ptr, block_table_ptr, tile, start, end, (end - start) // TILE, None, top, mass, acc),
        *(scale_log2e * k_scale, stride_cache_block, stride_cache_slot, HEAD_DIM, BLOCK_SIZE, 0, SOFT_CAP),
    )
    places = (queries.to(tl.int64) * num_heads + heads) * num_parts + part
    tl.store(lse_ptr + places, top + tl.log2(mass), mask=queries < query_end)
    acc = acc / mass[:, None] * v_scale
    output_ptrs = output_ptr + places[:, None] * HEAD_DIM + dims[None, :]
    tl.store(output_ptrs, acc.to(output_ptr.dtype.element_ty), mask=is_element)
