"""Attention over the paged cache: decode with one query a row, prefill with causal chunks of queries."""

from __future__ import annotations

import torch

from kernels.cpu.dense import qk_norm_rope_store_kv
from kernels.cpu.indexed_attention import attend_by_index
from kernels.cpu.kv_gather import KvGather, gather_plan
from kernels.cpu.paged_reads import KvReader
from kernels.cpu.partial_attention import AttentionState, RunningAttention, flash_attention, with_sinks
from kernels.cpu.shared_prefix import add_shared_prefixes, attend_unmasked
from kernels.operands import AttentionRows, ProjectedHeads, ScoreRule, refuse_float8

# Queries whose windows are attended to together: their first 512 keys, which the operator takes at a time, hold one at
# least for each.
WINDOW_QUERIES = 256


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_decode_attention`.

    Prefixes of `rows.prefix_groups` are attended once a group. Of the other keys, float32 reads each where it lies; in
    half precision, for which PyTorch has no such product, rows of similar length are gathered and attended together,
    and a row of more than 2048 tokens is cut into segments whose results are merged.

    Raises ValueError if there are not as many queries as rows, and for float8.
    """
    if q.shape[0] != rows.num_rows:
        raise ValueError(f"q has {q.shape[0]} queries for {rows.num_rows} rows; a decode row has exactly one")
    refuse_float8(k_cache, v_cache, rows.kv_scales)
    reader = KvReader(k_cache, v_cache)
    rule = ScoreRule(scale, rows.soft_cap)
    own = with_sinks(attend_single_queries(q, reader, rows, rule), rows.sinks)
    return add_shared_prefixes(q, reader, rows, rule, own)


def attend_single_queries(q: torch.Tensor, reader: KvReader, rows: AttentionRows, rule: ScoreRule) -> AttentionState:
    """Attention of the rows with one query over their own keys, those after a shared prefix.

    q [sum of query_lens, Hq, D] -> a state of as many queries, which the caller may overwrite; those of other rows have
    output 0 and log-sum-exp -inf.
    """
    if q.dtype is torch.float32:
        return attend_by_index(q, reader, rows, rule)
    plan = gather_plan(rows, reader.block_size, reader.max_tokens)
    if plan.num_segments <= 1:
        result = AttentionState.without_keys(q.shape, q.dtype)
        for gather in plan.gathers:
            part, part_lse = _attend_gather(q, reader, gather, rule)
            result.output.index_copy_(0, gather.query_ids, part.to(q.dtype))
            result.lse.index_copy_(0, gather.query_ids, part_lse)
        return result
    running = RunningAttention(q.shape)
    for gather in plan.gathers:
        running.add(gather.query_ids, *_attend_gather(q, reader, gather, rule))
    return running.state(q.dtype)


def _attend_gather(
    q: torch.Tensor, reader: KvReader, gather: KvGather, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [num_ranges, Hq, D] and log-sum-exp [num_ranges, Hq] over the keys of one gather."""
    keys, values = reader.read(gather.block_ids)
    if gather.mask is not None:
        # Not only masked but overwritten: -inf + NaN is NaN, and 0 * NaN too.
        keys.index_fill_(0, gather.padding_ids, 0)
        values.index_fill_(0, gather.padding_ids, 0)
    num_heads, head_dim = q.shape[1:]
    num_ranges, kv_heads = gather.num_ranges, reader.num_kv_heads
    # Query heads of one KV head become queries of one sequence: they see the same keys and share their reads.
    packed = q.index_select(0, gather.query_ids).view(num_ranges, kv_heads, num_heads // kv_heads, head_dim)
    output, lse = flash_attention(
        packed,
        keys.view(num_ranges, gather.num_tokens, kv_heads, head_dim).transpose(1, 2),
        values.view(num_ranges, gather.num_tokens, kv_heads, head_dim).transpose(1, 2),
        rule,
        mask=gather.mask,
    )
    return output.reshape(num_ranges, num_heads, head_dim), lse.reshape(num_ranges, num_heads)


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> torch.Tensor:
    """See `Operations.paged_prefill_attention`.

    Rows with one query are attended together, as in decode. Every other row is attended in two parts: the keys before
    its chunk, which all its queries see, and the chunk's own keys, causally. They are merged by log-sum-exp, so no mask
    is built. A prefix that several rows share is one more part, with the queries of all of them. With a window no two
    queries see the same keys, and there is a mask for a few of them at a time.
    """
    refuse_float8(k_cache, v_cache, rows.kv_scales)
    reader = KvReader(k_cache, v_cache)
    rule = ScoreRule(scale, rows.soft_cap)
    own = attend_single_queries(q, reader, rows, rule)
    end = 0
    for row, (query_len, kv_len) in enumerate(zip(rows.query_lens, rows.kv_lens, strict=True)):
        start, end = end, end + query_len
        start += max(query_len - kv_len, 0)  # queries without keys, which have 0
        if query_len > 1 and start < end:
            tokens = (rows.own_starts[row], kv_len)
            blocks = rows.block_tables[row].long()
            if rows.window is not None and rows.window < kv_len:
                state = _attend_window(q[start:end], reader, blocks, (rows.window, kv_len), rule)
            else:
                state = _attend_chunk(q[start:end], reader, blocks, tokens, rule)
            own.output[start:end], own.lse[start:end] = state.output, state.lse
    return add_shared_prefixes(q, reader, rows, rule, with_sinks(own, rows.sinks))


def _attend_chunk(
    q: torch.Tensor, reader: KvReader, block_table: torch.Tensor, tokens: tuple[int, int], rule: ScoreRule
) -> AttentionState:
    """q [Q, Hq, D], the last Q of tokens tokens[0] .. tokens[1] - 1; block_table [max_blocks] int64."""
    before = tokens[1] - q.shape[0]
    keys, values = reader.read_tokens(block_table, before, tokens[1])
    own, own_lse = flash_attention(q.transpose(0, 1)[None], keys, values, rule, causal=True)
    own, own_lse = own[0].transpose(0, 1), own_lse[0].transpose(0, 1)
    if before == tokens[0]:
        return AttentionState(own.to(q.dtype), own_lse)
    running = RunningAttention(q.shape)
    running.add(slice(None), own, own_lse)
    part = attend_unmasked(q, reader, block_table, (tokens[0], before), rule)
    running.add(slice(None), part.output, part.lse)
    return running.state(q.dtype)


def _attend_window(
    q: torch.Tensor, reader: KvReader, block_table: torch.Tensor, window_and_len: tuple[int, int], rule: ScoreRule
) -> AttentionState:
    """q [Q, Hq, D], the last Q of so many tokens, each of which sees the last `window` up to its own."""
    window, kv_len = window_and_len
    output, lse = torch.empty_like(q), torch.empty(q.shape[:2])
    for first in range(0, q.shape[0], WINDOW_QUERIES):
        some = q[first : first + WINDOW_QUERIES]
        place = kv_len - q.shape[0] + first
        start, end = max(place + 1 - window, 0), place + some.shape[0]
        keys, values = reader.read_tokens(block_table, start, end)
        num_behind = torch.arange(place, end)[:, None] - torch.arange(start, end)
        mask = torch.zeros(num_behind.shape).masked_fill_((num_behind < 0) | (num_behind >= window), -torch.inf)
        part, part_lse = flash_attention(some.transpose(0, 1)[None], keys, values, rule, mask=mask[None, None])
        output[first : first + WINDOW_QUERIES] = part[0].transpose(0, 1)
        lse[first : first + WINDOW_QUERIES] = part_lse[0].t()
    return AttentionState(output, lse)


def store_and_decode(heads: ProjectedHeads, rows: AttentionRows, scale: float) -> torch.Tensor:
    """See `Operations.store_and_decode`."""
    queries = qk_norm_rope_store_kv(*heads)
    return paged_decode_attention(queries, heads.k_cache, heads.v_cache, rows, scale)
