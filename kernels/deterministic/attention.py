"""Attention over the paged cache, one block of keys after another and always in the same shape.

A query gets the same bits in decode and in any chunk of a prefill.
"""

from __future__ import annotations

from typing import NamedTuple

import torch

from kernels.cpu.dense import qk_norm_rope_store_kv
from kernels.deterministic.key_blocks import (
    KEY_BLOCK_TOKENS,
    KeyBlockPlan,
    KeyBlockReader,
    RunningAttention,
    as_tiles,
    attend_key_block,
    from_tiles,
    queries_per_tile,
)
from kernels.operands import AttentionRows, ProjectedHeads, ScoreRule, refuse_float8

# Keys are copied this many bytes at a time, as in kernels.cpu.paged_reads.
SLAB_BYTES = 4 << 20
NO_WINDOW = 1 << 40


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_decode_attention`. Prefix groups are ignored, since they depend on the other rows.

    A query has the bits that `paged_prefill_attention` gives it, although it has a tile of its own here.

    Raises ValueError if there are not as many queries as rows, and for float8.
    """
    if q.shape[0] != rows.num_rows:
        raise ValueError(f"q has {q.shape[0]} queries for {rows.num_rows} rows; a decode row has exactly one")
    refuse_float8(k_cache, v_cache, rows.kv_scales)
    reader = KeyBlockReader(k_cache, v_cache)
    plan = rows.once(
        ("key_block_plan", reader.block_size),
        lambda: KeyBlockPlan.build(
            rows.block_tables, [rows.first_key(row) for row in range(rows.num_rows)], rows.kv_lens, reader.block_size
        ),
    )
    num_rows = plan.row_ids.shape[0]
    running = RunningAttention((num_rows, *q.shape[1:]))
    if num_rows:
        outputs, lses = _attend_pairs(q.index_select(0, plan.row_ids), reader, plan, ScoreRule(scale, rows.soft_cap))
        start = 0
        for count in plan.rows_with_block:
            running.add(slice(0, count), outputs[start : start + count], lses[start : start + count])
            start += count
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    return output.index_copy_(0, plan.row_ids, running.output(q.dtype, rows.sinks))


def _attend_pairs(
    q: torch.Tensor, reader: KeyBlockReader, plan: KeyBlockPlan, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [num_pairs, Hq, D] and log-sum-exp [num_pairs, Hq] of each pair; q [num_rows, Hq, D] as in row_ids."""
    group_size = q.shape[1] // reader.num_kv_heads
    per_tile = queries_per_tile(group_size)
    alone = q.new_zeros(q.shape[0], per_tile, *q.shape[1:])
    alone[:, 0] = q
    tiles = as_tiles(alone.flatten(0, 1), reader.num_kv_heads, per_tile)
    block_bytes = KEY_BLOCK_TOKENS * reader.num_kv_heads * reader.head_dim * torch.float32.itemsize
    slab = max(SLAB_BYTES // block_bytes, 1)
    outputs, lses = [], []
    for start in range(0, plan.places.shape[0], slab):
        pairs = slice(start, start + slab)
        keys, values = reader.read(plan.slots[pairs])
        own = tiles.index_select(0, plan.places[pairs])
        output, lse = attend_key_block(own, keys, values, plan.mask[pairs], rule)
        outputs.append(from_tiles(output, 1, group_size, output.shape[0]))
        lses.append(from_tiles(lse, 1, group_size, lse.shape[0]))
    return torch.cat(outputs), torch.cat(lses)


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_prefill_attention`. One row after another, one block of keys after another, and no prefix
    groups. Queries within a block see a part of it, later ones the whole; which of them share a tile changes no bit.
    """
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    refuse_float8(k_cache, v_cache, rows.kv_scales)
    reader = KeyBlockReader(k_cache, v_cache)
    start = 0
    for row, (query_len, kv_len) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        chunk = slice(start, start + query_len)
        if query_len > 0:
            plan = _row_plan(rows, row, reader.block_size)
            first_block = rows.first_key(row) // KEY_BLOCK_TOKENS
            span = ChunkSpan(first_block * KEY_BLOCK_TOKENS, kv_len, rows.window or NO_WINDOW)
            rule = ScoreRule(scale, rows.soft_cap)
            output[chunk] = _attend_chunk(q[chunk], reader, plan, span, rule).output(q.dtype, rows.sinks)
        start += query_len
    return output


def _row_plan(rows: AttentionRows, row: int, block_size: int) -> KeyBlockPlan:
    return rows.once(
        ("key_block_plan", block_size, row),
        lambda: KeyBlockPlan.build(
            rows.block_tables[row : row + 1], [rows.first_key(row)], rows.kv_lens[row : row + 1], block_size
        ),
    )


class ChunkSpan(NamedTuple):
    """The keys of a chunk."""

    start: int  # of its first block of keys
    end: int  # its own last token included
    window: int  # keys that a query sees at most, its own included


def _attend_chunk(
    q: torch.Tensor, reader: KeyBlockReader, plan: KeyBlockPlan, span: ChunkSpan, rule: ScoreRule
) -> RunningAttention:
    """q [Q, Hq, D], the last Q tokens of the span."""
    num_queries, group_size = q.shape[0], q.shape[1] // reader.num_kv_heads
    per_tile = queries_per_tile(group_size)
    running = RunningAttention(q.shape)
    for block in range(len(plan.rows_with_block)):
        keys, values = reader.read(plan.slots[block : block + 1])
        # Queries are counted from the block's first key: 0 sees this key alone, the last of the block and later ones
        # see the whole block, until their windows begin within it and then behind it.
        offset = span.end - num_queries - span.start - block * KEY_BLOCK_TOKENS
        edges = (0, KEY_BLOCK_TOKENS, span.window, span.window + KEY_BLOCK_TOKENS - 1)
        cuts = [min(max(edge - offset, 0), num_queries) for edge in sorted(edges)]
        for queries in map(slice, cuts, cuts[1:]):
            count = queries.stop - queries.start
            if count > 0:
                tiles = as_tiles(q[queries], reader.num_kv_heads, per_tile)
                mask = _mask(offset + queries.start, tiles.shape, (per_tile, group_size), span.window)
                output, lse = attend_key_block(tiles, keys, values, mask, rule)
                output, lse = (from_tiles(part, per_tile, group_size, count) for part in (output, lse))
                running.add(queries, output, lse)
    return running


def _mask(first: int, tiles_shape: torch.Size, per_tile_and_group: tuple[int, int], window: int) -> torch.Tensor:
    """[num_tiles, 1, rows, KEY_BLOCK_TOKENS] float32 for queries first, first + 1 and so on; a tile's padding is masked
    like a query. Where all see the whole block, one row of zeros.
    """
    num_tiles, _, rows, _ = tiles_shape
    per_tile, group_size = per_tile_and_group
    if first >= KEY_BLOCK_TOKENS - 1 and first + num_tiles * max(per_tile, rows // group_size) <= window:
        return torch.zeros(1, 1, 1, KEY_BLOCK_TOKENS)
    row = torch.arange(rows) // group_size
    query = first + torch.arange(num_tiles)[:, None] * per_tile + row
    num_behind = query[..., None] - torch.arange(KEY_BLOCK_TOKENS)
    is_unseen = (num_behind < 0) | (num_behind >= window)
    return torch.zeros(is_unseen.shape).masked_fill_(is_unseen, -torch.inf)[:, None]


def store_and_decode(heads: ProjectedHeads, rows: AttentionRows, scale: float) -> torch.Tensor:
    """See `Operations.store_and_decode`."""
    queries = qk_norm_rope_store_kv(*heads)
    return paged_decode_attention(queries, heads.k_cache, heads.v_cache, rows, scale)
