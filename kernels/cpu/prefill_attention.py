"""Causal attention of chunks of queries over the paged cache."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState
from kernels.cpu.decode_attention import attend_single_queries
from kernels.cpu.flash import flash_attention
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.running_attention import RunningAttention
from kernels.cpu.shared_prefix import add_shared_prefixes, attend_unmasked


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_prefill_attention`.

    Rows with one query go the way of decode, all together. Of every other row the keys before its chunk are seen by all
    its queries, so they need no mask, and the chunk's own keys are plainly causal. The two parts are merged by
    log-sum-exp: no mask is ever built, whatever the lengths, and nothing above the diagonal is computed but a tile.
    A prefix that several rows share is the same kind of part, with the queries of all of them.
    """
    reader = KvReader(k_cache, v_cache)
    own = attend_single_queries(q, reader, rows, scale)
    end = 0
    for row, (query_len, kv_len) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        start, end = end, end + query_len
        if query_len > 1:
            tokens = (rows.own_starts[row], kv_len)
            state = _attend_chunk(q[start:end], reader, rows.block_tables[row].long(), tokens, scale)
            own.output[start:end], own.lse[start:end] = state.output, state.lse
    return add_shared_prefixes(q, reader, rows, scale, own)


def _attend_chunk(
    q: torch.Tensor, reader: KvReader, block_table: torch.Tensor, tokens: tuple[int, int], scale: float
) -> AttentionState:
    """q [Q, Hq, D], the last Q of tokens tokens[0] .. tokens[1] - 1; block_table [max_blocks] int64."""
    num_queries, num_heads, head_dim = q.shape
    before = tokens[1] - num_queries
    keys, values = reader.read_tokens(block_table, before, tokens[1])
    own, own_lse = flash_attention(q.transpose(0, 1)[None], keys, values, scale, causal=True)
    own, own_lse = own[0].transpose(0, 1), own_lse[0].transpose(0, 1)
    if before == tokens[0]:
        return AttentionState(own.to(q.dtype), own_lse)
    running = RunningAttention((num_queries, num_heads, head_dim), q.device)
    running.add(slice(None), own, own_lse)
    part = attend_unmasked(q, reader, block_table, (tokens[0], before), scale)
    running.add(slice(None), part.output, part.lse)
    return running.state(q.dtype)
