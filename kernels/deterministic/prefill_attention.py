"""Causal attention of chunks of queries over the paged cache."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState
from kernels.deterministic.key_block_plan import KeyBlockPlan
from kernels.deterministic.key_block_reader import KeyBlockReader
from kernels.deterministic.key_blocks import (
    KEY_BLOCK_TOKENS,
    as_tiles,
    attend_key_block,
    from_tiles,
    queries_per_tile,
)
from kernels.deterministic.running_attention import RunningAttention


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_prefill_attention`. A row after the other, a block of keys after the other;
    prefix groups are left aside, since they depend on the other rows.

    Queries within the block see a part of it, those after it the whole; which of them share a tile changes no bit.
    """
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf)
    reader = KeyBlockReader(k_cache, v_cache)
    start = 0
    for row, (query_len, kv_len) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        chunk = slice(start, start + query_len)
        if query_len > 0:
            plan = _row_plan(rows, row, reader.block_size)
            output[chunk], lse[chunk] = _attend_chunk(q[chunk], reader, plan, kv_len, scale)
        start += query_len
    return AttentionState(output, lse)


def _row_plan(rows: AttentionRows, row: int, block_size: int) -> KeyBlockPlan:
    return rows.once(
        ("key_block_plan", block_size, row),
        lambda: KeyBlockPlan.build(rows.block_tables[row : row + 1], rows.kv_lens[row : row + 1], block_size),
    )


def _attend_chunk(
    q: torch.Tensor, reader: KeyBlockReader, plan: KeyBlockPlan, kv_len: int, scale: float
) -> AttentionState:
    """q [Q, Hq, D], the last Q of kv_len tokens."""
    num_queries, num_heads, head_dim = q.shape
    group_size = num_heads // reader.num_kv_heads
    per_tile = queries_per_tile(group_size)
    running = RunningAttention((num_queries, num_heads, head_dim), q.device)
    for block in range(len(plan.rows_with_block)):
        keys, values = reader.read(plan.slots[block : block + 1])
        # Queries are counted from the block's first key: 0 sees this key alone, the last of the block and all later
        # ones see the whole block.
        offset = kv_len - num_queries - block * KEY_BLOCK_TOKENS
        num_before = min(max(-offset, 0), num_queries)
        split = min(max(KEY_BLOCK_TOKENS - offset, 0), num_queries)
        for queries in (slice(num_before, split), slice(split, num_queries)):
            count = queries.stop - queries.start
            if count > 0:
                tiles = as_tiles(q[queries], reader.num_kv_heads, per_tile)
                mask = _mask(offset + queries.start, tiles.shape, per_tile, group_size)
                output, lse = attend_key_block(tiles, keys, values, mask, scale)
                output, lse = (from_tiles(part, per_tile, group_size, count) for part in (output, lse))
                running.add(queries, output, lse)
    return running.state(q.dtype)


def _mask(first: int, tiles_shape: torch.Size, per_tile: int, group_size: int) -> torch.Tensor:
    """[num_tiles, 1, rows, KEY_BLOCK_TOKENS] float32 for queries first, first + 1 and so on; what fills up a tile is
    masked like a query. A mask of zeros, of one row, where all see the whole block.
    """
    if first >= KEY_BLOCK_TOKENS - 1:
        return torch.zeros(1, 1, 1, KEY_BLOCK_TOKENS)
    num_tiles, _, rows, _ = tiles_shape
    row = torch.arange(rows) // group_size
    query = first + torch.arange(num_tiles)[:, None] * per_tile + row
    is_unseen = torch.arange(KEY_BLOCK_TOKENS) > query[..., None]
    return torch.zeros(is_unseen.shape).masked_fill_(is_unseen, -torch.inf)[:, None]
