"""Attention of one query a row over the paged cache."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState
from kernels.cpu.flash import flash_attention
from kernels.cpu.indexed_attention import attend_by_index
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.running_attention import RunningAttention
from kernels.cpu.shared_prefix import add_shared_prefixes
from kernels.kv_gather import KvGather


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_decode_attention`. A row without keys gets output 0 and log-sum-exp -inf.

    Prefixes of `rows.prefix_groups` are attended once a group. Of the other keys, float32 reads each where it lies; in
    half precision, for which PyTorch has no such product, rows of similar length are gathered and attended together,
    and a row of more than 2048 tokens is cut into segments whose results are merged.

    Raises ValueError if there are not as many queries as rows.
    """
    if q.shape[0] != rows.num_rows:
        raise ValueError(f"q has {q.shape[0]} queries for {rows.num_rows} rows; a decode row has exactly one")
    reader = KvReader(k_cache, v_cache)
    return add_shared_prefixes(q, reader, rows, scale, attend_single_queries(q, reader, rows, scale))


def attend_single_queries(q: torch.Tensor, reader: KvReader, rows: AttentionRows, scale: float) -> AttentionState:
    """Attention of the rows with one query over their own keys, those after a shared prefix; nothing of other rows.

    The result is the caller's to write on.
    """
    if q.dtype is torch.float32:
        return attend_by_index(q, reader, rows, scale)
    plan = rows.gather_plan(reader.block_size, reader.max_tokens)
    if plan.num_segments <= 1:
        result = AttentionState.without_keys(q, q.dtype)
        for gather in plan.gathers:
            part, part_lse = _attend(q, reader, gather, scale)
            result.output.index_copy_(0, gather.query_ids, part.to(q.dtype))
            result.lse.index_copy_(0, gather.query_ids, part_lse)
        return result
    running = RunningAttention((q.shape[0], q.shape[1], q.shape[2]), q.device)
    for gather in plan.gathers:
        running.add(gather.query_ids, *_attend(q, reader, gather, scale))
    return running.state(q.dtype)


def _attend(q: torch.Tensor, reader: KvReader, gather: KvGather, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
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
        scale,
        mask=gather.mask,
    )
    return output.reshape(num_ranges, num_heads, head_dim), lse.reshape(num_ranges, num_heads)
