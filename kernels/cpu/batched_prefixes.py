"""Attention over equally long prefixes of several groups, in float32."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState
from kernels.cpu.attention_merge import merge_attention_states
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.prefix_batch import PrefixBatch


def add_prefix_batch(
    q: torch.Tensor, reader: KvReader, batch: PrefixBatch, scale: float, result: AttentionState
) -> None:
    """Merge attention over the prefixes into `result`, which holds each row's attention over its own keys.

    q [sum of query_lens, Hq, D] float32; `result` is changed in place.
    """
    head_dim, kv_heads = q.shape[2], reader.num_kv_heads
    vectors = q.reshape(-1, head_dim).index_select(0, batch.vector_ids)
    scores = q.new_empty(vectors.shape[0], batch.num_tokens)
    unused = q.new_empty(())
    for place, blocks in batch.members:
        queries, products = (t[place].view(kv_heads, -1, t.shape[1]) for t in (vectors, scores))
        keys = reader.keys.read_run(blocks).transpose(1, 2)
        torch.baddbmm(unused, queries, keys, beta=0, alpha=scale, out=products)
    largest = scores.amax(-1, keepdim=True)
    weights = scores.sub_(largest).exp_()
    sums = weights.sum(-1, keepdim=True)
    for place, blocks in batch.members:
        shares, products = (t[place].view(kv_heads, -1, t.shape[1]) for t in (weights, vectors))
        torch.bmm(shares, reader.values.read_run(blocks), out=products)
    part = AttentionState(vectors.div_(sums), largest.add_(sums.log_()).squeeze(-1))
    outputs, lse = result.output.view(-1, head_dim), result.lse.view(-1)
    own = AttentionState(outputs.index_select(0, batch.vector_ids), lse.index_select(0, batch.vector_ids))
    merged = merge_attention_states(own, part)
    outputs.index_copy_(0, batch.vector_ids, merged.output)
    lse.index_copy_(0, batch.vector_ids, merged.lse)
