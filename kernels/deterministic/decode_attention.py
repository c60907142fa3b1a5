"""Attention of one query a row over the paged cache."""

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

# Keys are copied this many bytes at a time, as in kernels.cpu.kv_reader.
SLAB_BYTES = 4 << 20


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_decode_attention`. A row without keys gets output 0 and log-sum-exp -inf.
    Prefix groups are left aside: they depend on the other rows.

    The bits of a query are those that `paged_prefill_attention` gives it: a tile of its own stands for its tile there.

    Raises ValueError if there are not as many queries as rows.
    """
    if q.shape[0] != rows.num_rows:
        raise ValueError(f"q has {q.shape[0]} queries for {rows.num_rows} rows; a decode row has exactly one")
    reader = KeyBlockReader(k_cache, v_cache)
    plan = rows.once(
        ("key_block_plan", reader.block_size),
        lambda: KeyBlockPlan.build(rows.block_tables, rows.kv_lens, reader.block_size),
    )
    num_rows, (_, num_heads, head_dim) = plan.row_ids.shape[0], q.shape
    running = RunningAttention((num_rows, num_heads, head_dim), q.device)
    if num_rows:
        outputs, lses = _attend_pairs(q.index_select(0, plan.row_ids), reader, plan, scale)
        start = 0
        for count in plan.rows_with_block:
            running.add(slice(0, count), outputs[start : start + count], lses[start : start + count])
            start += count
    state = running.state(q.dtype)
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf)
    output.index_copy_(0, plan.row_ids, state.output)
    lse.index_copy_(0, plan.row_ids, state.lse)
    return AttentionState(output, lse)


def _attend_pairs(
    q: torch.Tensor, reader: KeyBlockReader, plan: KeyBlockPlan, scale: float
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
        output, lse = attend_key_block(own, keys, values, plan.mask[pairs], scale)
        outputs.append(from_tiles(output, 1, group_size, output.shape[0]))
        lses.append(from_tiles(lse, 1, group_size, lse.shape[0]))
    return torch.cat(outputs), torch.cat(lses)
