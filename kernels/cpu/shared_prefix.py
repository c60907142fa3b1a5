"""Attention over keys that neighbouring rows share, computed once for all of them.

Groups with equally long prefixes are attended together, in float32; the others one by one.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator
from itertools import accumulate
from typing import NamedTuple

import torch

from kernels.cpu.paged_reads import BlockRun, KvReader
from kernels.cpu.partial_attention import (
    MAX_QUERIES,
    MIN_QUERIES,
    AttentionState,
    RunningAttention,
    cap,
    flash_attention,
    matmul_attention,
    merge_attention_states,
)
from kernels.operands import AttentionRows, PrefixGroup, ScoreRule

# Bytes of keys read at a time, and as many of values. 16 rows over 1024 keys of 8 heads of 128 in float32 take 8.8 ms
# with 2 MiB, 9.6 with 0.5 or 1 and 12.6 with 4 (one thread, Xeon 2.5 GHz).
PIECE_BYTES = 2 << 20

# Scores that groups of one batch may have together: 4 MiB of them. 64 rows of 16 heads over 512 keys have half as many.
MAX_BATCH_SCORES = 1 << 20


class _Read(NamedTuple):
    queries: slice
    blocks: torch.Tensor  # [num_blocks], int64
    num_tokens: int


class PrefixBatch(NamedTuple):
    """Groups that are attended together: two products for each, and every other operation once for all of them.

    Group by group, that dozen of small operations costs more than the products.
    """

    # [n], int64: query * Hkv + KV head, one KV head of a group after another. Each stands for Hq / Hkv vectors.
    head_ids: torch.Tensor
    num_vectors: tuple[int, ...]  # of each group
    prefixes: tuple[BlockRun, ...]  # of each group
    num_tokens: int  # of each prefix


class _Plan(NamedTuple):
    queries: slice  # from the first query of the first group to the last of the last; below, queries count from there
    batches: tuple[PrefixBatch, ...]
    reads: tuple[_Read, ...]  # groups that are attended one by one


def add_shared_prefixes(
    q: torch.Tensor, reader: KvReader, rows: AttentionRows, rule: ScoreRule, own: AttentionState
) -> torch.Tensor:
    """Output of attention over all keys: `own`, over those after the shared prefixes, merged with each group's prefix.

    q [sum of query_lens, Hq, D]; own may be written.
    """
    if not rows.prefix_groups:
        return own.output
    key = ("prefix_plan", q.itemsize, q.shape[1], reader.num_kv_heads, reader.head_dim, reader.block_size)
    plan = rows.once(key, lambda: _make_plan(q, reader, rows))
    # One merge for all groups and the rows between them, which cost less than a second merge would.
    shared = _attend_groups(q[plan.queries], reader, plan, rule)
    merged = merge_attention_states(AttentionState(own.output[plan.queries], own.lse[plan.queries]), shared)
    if merged.shape == own.output.shape:
        return merged
    own.output[plan.queries] = merged
    return own.output


def _attend_groups(q: torch.Tensor, reader: KvReader, plan: _Plan, rule: ScoreRule) -> AttentionState:
    """Attention over the prefixes, in float32; output 0 and log-sum-exp -inf for queries in no group.

    q: the plan's queries.
    """
    result = AttentionState.without_keys(q.shape, torch.float32)
    for batch in plan.batches:
        attend_prefix_batch(q, reader, batch, rule, result)
    for queries, blocks, num_tokens in plan.reads:
        state = attend_unmasked(q[queries], reader, blocks, (0, num_tokens), rule)
        result.output[queries], result.lse[queries] = state.output, state.lse
    return result


def attend_unmasked(
    q: torch.Tensor, reader: KvReader, block_table: torch.Tensor, tokens: tuple[int, int], rule: ScoreRule
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
        part, lse = attend_packed(packed, *reader.read_tokens(block_table, start, end), rule)
        part = part.view(-1, num_queries, group_size, head_dim).transpose(0, 1).reshape(q.shape)
        return AttentionState(part, lse.view(-1, num_queries, group_size).transpose(0, 1).reshape(q.shape[:2]))

    piece_tokens = reader.tokens_of(PIECE_BYTES)
    if tokens[1] - tokens[0] <= piece_tokens:
        return attend(*tokens)
    running = RunningAttention(q.shape)
    for start in range(*tokens, piece_tokens):
        running.add(slice(None), *attend(start, min(start + piece_tokens, tokens[1])))
    return running.state(torch.float32)


def _is_by_matmul(q: torch.Tensor, num_packed: int) -> bool:
    """num_packed: queries of one KV head."""
    return q.dtype is torch.float32 and MIN_QUERIES <= num_packed <= MAX_QUERIES


def _make_plan(q: torch.Tensor, reader: KvReader, rows: AttentionRows) -> _Plan:
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


def prefix_batches(
    groups: Iterable[tuple[slice, PrefixGroup]], block_tables: torch.Tensor, heads: tuple[int, int], block_size: int
) -> Iterator[PrefixBatch]:
    """Batches of groups whose prefixes are equally long.

    groups: each with the queries of its members; block_tables [num_rows, max_blocks] int32; heads: (Hq, Hkv).
    """
    by_length: dict[int, list[tuple[slice, PrefixGroup]]] = defaultdict(list)
    for queries, group in groups:
        by_length[group.num_tokens].append((queries, group))
    for num_tokens, equals in by_length.items():
        for part in _parts_of_groups(equals, MAX_BATCH_SCORES // num_tokens // heads[0]):
            ids = [_head_ids(queries, heads[1]) for queries, _ in part]
            num_blocks = num_tokens // block_size
            yield PrefixBatch(
                torch.cat(ids),
                tuple(each.shape[0] * heads[0] // heads[1] for each in ids),
                tuple(BlockRun.of(block_tables[group.first_row, :num_blocks].long()) for _, group in part),
                num_tokens,
            )


def _parts_of_groups(
    groups: Iterable[tuple[slice, PrefixGroup]], max_queries: int
) -> Iterator[list[tuple[slice, PrefixGroup]]]:
    """Cuts the groups into runs of at most max_queries queries; a group alone may have more."""
    part: list[tuple[slice, PrefixGroup]] = []
    num_queries = 0
    for queries, group in groups:
        more = queries.stop - queries.start
        if part and num_queries + more > max_queries:
            yield part
            part, num_queries = [], 0
        part.append((queries, group))
        num_queries += more
    yield part


def _head_ids(queries: slice, num_kv_heads: int) -> torch.Tensor:
    ids = torch.arange(queries.start * num_kv_heads, queries.stop * num_kv_heads)
    return ids.view(-1, num_kv_heads).t().flatten()


def attend_prefix_batch(
    q: torch.Tensor, reader: KvReader, batch: PrefixBatch, rule: ScoreRule, result: AttentionState
) -> None:
    """Write the attention of the groups' rows over their prefixes to `result`.

    q [sum of query_lens, Hq, D] float32.
    """
    head_dim, kv_heads = q.shape[2], reader.num_kv_heads
    group_size = q.shape[1] // kv_heads
    packed = q.reshape(-1, group_size * head_dim).index_select(0, batch.head_ids)
    vectors = packed.view(-1, head_dim)
    scores = q.new_empty(vectors.shape[0], batch.num_tokens)
    unused = q.new_empty(())
    queries, products = _by_group(vectors, batch, kv_heads), _by_group(scores, batch, kv_heads)
    for blocks, own_queries, out in zip(batch.prefixes, queries, products, strict=True):
        torch.baddbmm(
            unused, own_queries, reader.keys.read_run(blocks).transpose(1, 2), beta=0, alpha=rule.scale, out=out
        )
    scores = cap(scores, rule.soft_cap)
    largest = scores.amax(-1, keepdim=True)
    sums = scores.sub_(largest).exp_().sum(-1, keepdim=True)
    for blocks, weights, out in zip(batch.prefixes, products, queries, strict=True):
        torch.bmm(weights, reader.values.read_run(blocks), out=out)  # overwrites the queries, no longer needed
    vectors.div_(sums)
    result.output.view(-1, packed.shape[1]).index_copy_(0, batch.head_ids, packed)
    result.lse.view(-1, group_size).index_copy_(0, batch.head_ids, largest.add_(sums.log_()).view(-1, group_size))


def _by_group(vectors: torch.Tensor, batch: PrefixBatch, kv_heads: int) -> list[torch.Tensor]:
    """vectors [n * Hq / Hkv, X] -> of each group [Hkv, its queries * Hq / Hkv, X]."""
    return [part.view(kv_heads, -1, vectors.shape[1]) for part in torch.split(vectors, list(batch.num_vectors))]
