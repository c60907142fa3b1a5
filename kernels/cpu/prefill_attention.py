"""Causal attention of chunks of queries over the paged cache."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState
from kernels.cpu.decode_attention import attend_single_queries
from kernels.cpu.flash import flash_attention
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.running_attention import RunningAttention


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_prefill_attention`.

    Rows with one query go the way of decode, all together. Of every other row the keys before its chunk are seen by all
    its queries, so they need no mask, and the chunk's own keys are plainly causal. The two parts are merged by
    log-sum-exp: no mask is ever built, whatever the lengths, and nothing above the diagonal is computed but a tile.
    """
    output = torch.zeros_like(q, memory_format=torch.contiguous_format)
    lse = torch.full(q.shape[:2], -torch.inf)
    reader = KvReader(k_cache, v_cache)
    attend_single_queries(q, reader, rows, scale, AttentionState(output, lse))
    start = 0
    for row, (query_len, kv_len) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        end = start + query_len
        if query_len > 1:
            block_table = rows.block_tables[row].long()
            state = _attend_chunk(q[start:end], reader, block_table, kv_len, scale)
            output[start:end], lse[start:end] = state.output, state.lse
        start = end
    return AttentionState(output, lse)


def _attend_chunk(
    q: torch.Tensor, reader: KvReader, block_table: torch.Tensor, kv_len: int, scale: float
) -> AttentionState:
    """q [Q, Hq, D], the last Q of kv_len tokens; block_table [max_blocks] int64."""
    num_queries, num_heads, head_dim = q.shape
    before = kv_len - num_queries
    keys, values = _read_tokens(reader, block_table, before, kv_len)
    own, own_lse = flash_attention(q.transpose(0, 1)[None], keys, values, scale, causal=True)
    own, own_lse = own[0].transpose(0, 1), own_lse[0].transpose(0, 1)
    if before == 0:
        return AttentionState(own.to(q.dtype), own_lse)
    running = RunningAttention((num_queries, num_heads, head_dim), q.device)
    running.add(slice(None), own, own_lse)
    # Query heads of one KV head are packed into the query length: each key is read once, not once a head.
    group = num_heads // reader.num_kv_heads
    packed = q.view(num_queries, -1, group, head_dim).permute(1, 2, 0, 3)
    packed = packed.reshape(1, -1, group * num_queries, head_dim)
    for start in range(0, before, reader.max_tokens):
        keys, values = _read_tokens(reader, block_table, start, min(start + reader.max_tokens, before))
        part, part_lse = flash_attention(packed, keys, values, scale)
        part = part.view(num_heads, num_queries, head_dim).transpose(0, 1)
        running.add(slice(None), part, part_lse.reshape(num_heads, num_queries).t())
    return running.state(q.dtype)


def _read_tokens(
    reader: KvReader, block_table: torch.Tensor, start: int, end: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys and values of tokens start .. end - 1 of a row, each [1, Hkv, end - start, D]."""
    first_block = start // reader.block_size
    last_block = -(-end // reader.block_size)
    keys, values = reader.read(block_table[first_block:last_block])
    offset = start - first_block * reader.block_size
    tokens = slice(offset, offset + end - start)
    return keys[tokens].transpose(0, 1)[None], values[tokens].transpose(0, 1)[None]
