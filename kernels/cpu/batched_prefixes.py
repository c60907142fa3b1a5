"""Attention over equally long prefixes of several groups, in float32."""

from __future__ import annotations

import torch

from kernels.attention_state import AttentionState
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.prefix_batch import PrefixBatch


def attend_prefix_batch(
    q: torch.Tensor, reader: KvReader, batch: PrefixBatch, scale: float, result: AttentionState
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
        torch.baddbmm(unused, own_queries, reader.keys.read_run(blocks).transpose(1, 2), beta=0, alpha=scale, out=out)
    largest = scores.amax(-1, keepdim=True)
    sums = scores.sub_(largest).exp_().sum(-1, keepdim=True)
    for blocks, weights, out in zip(batch.prefixes, products, queries, strict=True):
        torch.bmm(weights, reader.values.read_run(blocks), out=out)  # over the queries, which have served
    vectors.div_(sums)
    result.output.view(-1, packed.shape[1]).index_copy_(0, batch.head_ids, packed)
    result.lse.view(-1, group_size).index_copy_(0, batch.head_ids, largest.add_(sums.log_()).view(-1, group_size))


def _by_group(vectors: torch.Tensor, batch: PrefixBatch, kv_heads: int) -> list[torch.Tensor]:
    """vectors [n * Hq / Hkv, X] -> of each group [Hkv, its queries * Hq / Hkv, X]."""
    return [part.view(kv_heads, -1, vectors.shape[1]) for part in torch.split(vectors, list(batch.num_vectors))]
