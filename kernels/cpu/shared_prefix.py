"""Attention over keys that neighbouring rows share, computed once for all of them."""

from __future__ import annotations

from itertools import accumulate
from typing import NamedTuple

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState
from kernels.cpu.attention_merge import merge_attention_states
from kernels.cpu.batched_prefixes import attend_prefix_batch
from kernels.cpu.flash import flash_attention
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.matmul_attention import MAX_QUERIES, MIN_QUERIES, matmul_attention
from kernels.cpu.prefix_batch import PrefixBatch, prefix_batches
from kernels.cpu.running_attention import RunningAttention
from kernels.prefix_group import PrefixGroup

# Bytes of keys read at a time, values as much again. 16 rows over 1024 keys of 8 heads of 128 in float32 take 8.8 ms
# with 2 MiB, 9.6 with 0.5 or 1 and 12.6 with 4 (one thread, Xeon 2.5 GHz).
PIECE_BYTES = 2 << 20


class _Read(NamedTuple):
    queries: slice
    blocks: torch.Tensor  # [num_blocks], int64
    num_tokens: int


class _Plan(NamedTuple):
    queries: slice  # from the first of the first group to the last of the last one; below they are counted from there
    batches: tuple[PrefixBatch, ...]
    reads: tuple[_Read, ...]  # groups that are attended one by one


def add_shared_prefixes(
    q: torch.Tensor, reader: KvReader, rows: AttentionRows, scale: float, own: AttentionState
) -> AttentionState:
    """Attention over all keys: `own`, which is over those behind the shared prefixes and is the caller's no more, and
    over each group's prefix.

    q [sum of query_lens, Hq, D].
    """
    if not rows.prefix_groups:
        return own
    key = ("prefix_plan", q.itemsize, q.shape[1], reader.num_kv_heads, reader.head_dim, reader.block_size)
    plan = rows.once(key, lambda: _plan(q, reader, rows))
    # One merge for all groups, and what lies between them: its operations cost more than a few rows do.
    shared = _attend_groups(q[plan.queries], reader, plan, scale)
    merged = merge_attention_states(AttentionState(own.output[plan.queries], own.lse[plan.queries]), shared)
    if merged.lse.shape == own.lse.shape:
        return merged
    own.output[plan.queries], own.lse[plan.queries] = merged.output, merged.lse
    return own


def _attend_groups(q: torch.Tensor, reader: KvReader, plan: _Plan, scale: float) -> AttentionState:
    """Attention over the prefixes, in float32; nothing of queries in no group. q: the plan's queries."""
    result = AttentionState.without_keys(q, torch.float32)
    for batch in plan.batches:
        attend_prefix_batch(q, reader, batch, scale, result)
    for queries, blocks, num_tokens in plan.reads:
        state = attend_unmasked(q[queries], reader, blocks, (0, num_tokens), scale)
        result.output[queries], result.lse[queries] = state.output, state.lse
    return result


def attend_unmasked(
    q: torch.Tensor, reader: KvReader, block_table: torch.Tensor, tokens: tuple[int, int], scale: float
) -> AttentionState:
    """Attention of queries that all see all of tokens tokens[0] .. tokens[1] - 1 of one sequence.

    q [Q, Hq, D]; block_table [n] int64; at least one token. Output in q's dtype, or in float32.
    """
    num_queries, num_heads, head_dim = q.shape
    group_size = num_heads // reader.num_kv_heads
    # Query heads of one KV head are packed into the query length: each key is read once, not once a head.
    packed = q.view(num_queries, -1, group_size, head_dim).transpose(0, 1)
    packed = packed.reshape(1, -1, num_queries * group_size, head_dim)
    by_matmul = _is_by_matmul(q, packed.shape[2])
    attend_packed = matmul_attention if by_matmul else flash_attention

    def attend(start: int, end: int) -> AttentionState:
        part, lse = attend_packed(packed, *reader.read_tokens(block_table, start, end), scale)
        part = part.view(-1, num_queries, group_size, head_dim).transpose(0, 1).reshape(q.shape)
        return AttentionState(part, lse.view(-1, num_queries, group_size).transpose(0, 1).reshape(q.shape[:2]))

    piece_tokens = reader.tokens_of(PIECE_BYTES)
    if tokens[1] - tokens[0] <= piece_tokens:
        return attend(*tokens)
    running = RunningAttention((num_queries, num_heads, head_dim), q.device)
    for start in range(*tokens, piece_tokens):
        running.add(slice(None), *attend(start, min(start + piece_tokens, tokens[1])))
    return running.state(torch.float32)


def _is_by_matmul(q: torch.Tensor, num_packed: int) -> bool:
    """num_packed: queries of one KV head."""
    return q.dtype is torch.float32 and MIN_QUERIES <= num_packed <= MAX_QUERIES


def _plan(q: torch.Tensor, reader: KvReader, rows: AttentionRows) -> _Plan:
    ends = [0, *accumulate(rows.query_lens)]
    first, last = rows.prefix_groups[0], rows.prefix_groups[-1]
    span = slice(ends[first.first_row], ends[last.first_row + last.num_rows])
    group_size = q.shape[1] // reader.num_kv_heads
    batched: list[tuple[slice, PrefixGroup]] = []
    reads: list[_Read] = []
    for group in rows.prefix_groups:
        queries = slice(*(ends[row] - span.start for row in (group.first_row, group.first_row + group.num_rows)))
        num_packed = (queries.stop - queries.start) * group_size
        if _is_by_matmul(q, num_packed) and group.num_tokens <= reader.tokens_of(PIECE_BYTES):
            batched.append((queries, group))
        elif num_packed:
            blocks = rows.block_tables[group.first_row, : group.num_tokens // reader.block_size].long()
            reads.append(_Read(queries, blocks, group.num_tokens))
    heads = (q.shape[1], reader.num_kv_heads)
    return _Plan(span, tuple(prefix_batches(batched, rows.block_tables, heads, reader.block_size)), tuple(reads))
