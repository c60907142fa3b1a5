"""Attention of one query a row in float32 that reads keys and values where they lie in the paged cache."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain

import torch

from kernels.attention_rows import AttentionRows
from kernels.attention_state import AttentionState
from kernels.cpu.key_chunks import MAX_KEPT_SCORES, KeyChunks, key_chunks, num_scores
from kernels.cpu.kv_reader import KvReader
from kernels.cpu.running_attention import RunningAttention


def attend_by_index(q: torch.Tensor, reader: KvReader, rows: AttentionRows, scale: float) -> AttentionState:
    """Attention of the rows with one query over their own keys, in float32; nothing of other rows.

    Scores are a sampled dense-dense product, the weighted sum of values an embedding bag: both take the keys by index.
    A gather copies every key first, and products of one or two queries reach 5 GFLOP/s: with one thread 64 rows of 448
    to 512 keys, 8 heads of 128, took 137 ms so and take 43, and 33 and 10 with 64 to 128 keys.
    """
    pieces = _pieces(rows, q.shape[1], reader)
    first, second = next(pieces, None), next(pieces, None)
    if first is not None and second is None and first.num_rows == q.shape[0]:
        return AttentionState(*_attend(q, reader, first, scale))
    running = RunningAttention((q.shape[0], q.shape[1], q.shape[2]), q.device)
    for piece in chain(filter(None, (first, second)), pieces):  # one at a time: each may be tens of MB
        running.add(piece.query_ids, *_attend(q, reader, piece, scale))
    return running.state(q.dtype)


def _pieces(rows: AttentionRows, num_heads: int, reader: KvReader) -> Iterator[KeyChunks]:
    shape = (reader.num_blocks, reader.block_size, reader.num_kv_heads, reader.head_dim)
    if num_scores(rows, num_heads) > MAX_KEPT_SCORES:
        return key_chunks(rows, num_heads, shape)
    return iter(rows.once(("key_chunks", num_heads, *shape), lambda: tuple(key_chunks(rows, num_heads, shape))))


def _attend(q: torch.Tensor, reader: KvReader, chunks: KeyChunks, scale: float) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, Hq, D] and log-sum-exp [n, Hq] over the keys of the chunks."""
    num_heads, head_dim = q.shape[1:]
    keys, values = reader.keys.vectors, reader.values.vectors
    queries = q.index_select(0, chunks.query_ids.index_select(0, chunks.chunk_rows)).view(-1, head_dim)
    # In place: for a new product the indices would be copied, too, as many bytes as the scores.
    scores, products = chunks.scores.copy_(chunks.bias), chunks.products
    torch.sparse.sampled_addmm(products, queries, keys.t(), beta=1.0, alpha=scale, out=products)
    maxima = scores.amax(-1).index_select(0, chunks.row_chunks.view(-1))
    row_max = maxima.view(*chunks.row_chunks.shape, num_heads).amax(1)
    weights = scores.sub_(row_max.index_select(0, chunks.chunk_rows)[..., None]).exp_()
    parts = torch.embedding_bag(values, chunks.key_ids, chunks.key_offsets, False, 0, False, weights.view(-1), True)[0]
    output = _sum_by_row(parts.view(chunks.num_chunks, -1), chunks).view(-1, num_heads, head_dim)
    sums = _sum_by_row(weights.sum(-1), chunks)
    return output.div_(sums[..., None]), row_max.add_(sums.log_())


def _sum_by_row(parts: torch.Tensor, chunks: KeyChunks) -> torch.Tensor:
    """parts [c, X] -> [n, X]."""
    if chunks.num_chunks == chunks.num_rows:
        return parts
    return torch.embedding_bag(parts, chunks.chunks, chunks.row_offsets, False, 0, False, None, True)[0]
