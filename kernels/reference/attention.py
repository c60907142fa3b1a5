"""Attention over the paged cache."""

from __future__ import annotations

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState


def paged_decode_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_decode_attention`: the prefill of chunks of one query."""
    return paged_prefill_attention(q, k_cache, v_cache, rows, scale)


def paged_prefill_attention(
    q: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, rows: AttentionRows, scale: float
) -> AttentionState:
    """See `Operations.paged_prefill_attention`. One row, head and query at a time; prefix groups are left aside."""
    num_heads = q.shape[1]
    group_size = num_heads // k_cache.shape[2]
    output = torch.zeros_like(q)
    lse = torch.full(q.shape[:2], -torch.inf)
    for row in range(rows.num_rows):
        start, end = int(rows.cu_seqlens_q[row]), int(rows.cu_seqlens_q[row + 1])
        kv_len = int(rows.seq_lens[row])
        keys = _tokens(k_cache, rows.block_tables[row], kv_len)
        values = _tokens(v_cache, rows.block_tables[row], kv_len)
        for query in range(start, end):
            num_seen = kv_len - (end - 1 - query)
            for head in range(num_heads if num_seen > 0 else 0):
                seen_keys = keys[:num_seen, head // group_size]
                scores = seen_keys @ q[query, head].float() * scale
                probabilities = torch.softmax(scores, dim=0)
                output[query, head] = probabilities @ values[:num_seen, head // group_size]
                lse[query, head] = torch.logsumexp(scores, dim=0)
    return AttentionState(output, lse)


def merge_attention_states(first: AttentionState, second: AttentionState) -> AttentionState:
    """See `Operations.merge_attention_states`. One query, one head at a time; a NaN in either shows in the result."""
    output = torch.zeros_like(first.output)
    lse = torch.full_like(first.lse, -torch.inf)
    for index in torch.cartesian_prod(*(torch.arange(size) for size in first.lse.shape)):
        place = tuple(index.tolist())
        pair = torch.stack((first.lse[place], second.lse[place]))
        if (pair == -torch.inf).all():
            continue
        shares = torch.softmax(pair, dim=0)
        output[place] = shares[0] * first.output[place].float() + shares[1] * second.output[place].float()
        lse[place] = torch.logsumexp(pair, dim=0)
    return AttentionState(output, lse)


def _tokens(cache: torch.Tensor, block_table: torch.Tensor, kv_len: int) -> torch.Tensor:
    """The first kv_len tokens of a row, [kv_len, Hkv, D] float32."""
    block_size = cache.shape[1]
    tokens = [cache[int(block_table[i // block_size]), i % block_size] for i in range(kv_len)]
    return torch.stack(tokens).float() if tokens else cache.new_empty(0, *cache.shape[2:]).float()
