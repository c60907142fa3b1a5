"""Attention of one query a row in float32 that reads keys and values where they lie in the paged cache.

The keys of a row are listed by index, in chunks, for operators that take an index instead of a copy.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import torch

from kernels.cpu.paged_reads import KvReader
from kernels.cpu.partial_attention import AttentionState, RunningAttention, cap
from kernels.operands import AttentionRows, ScoreRule

# Keys of a row that all its heads read before the next ones. The keys of one head lie a whole token apart, so a head
# that reads all of a long row misses the TLB at every key: the scores of 64 rows of 448 to 512 keys, 8 heads of 128,
# took 60 ms uncut, 26 in chunks of 32 and 29 of 16 (one thread, Xeon 2.5 GHz).
CHUNK_TOKENS = 32
# Added to the score of a key that is there only to fill a chunk. Its share becomes 31 * exp(-40) = 1e-16 of what the
# same key has already, less than float32 can add to it. Not -inf, since exp takes three times as long below -87: so
# scores may lie 47 below their row's largest before it slows down.
REPEATED_BIAS = -40.0
# Scores of one piece: 4 MiB of them, and as much of indices.
MAX_SCORES = 1 << 20
# Up to here the pieces of a step are kept for all layers; beyond, each layer makes them anew: about 4 ns a score, of
# the 50 that the score itself takes.
MAX_KEPT_SCORES = 4 * MAX_SCORES


def attend_by_index(q: torch.Tensor, reader: KvReader, rows: AttentionRows, rule: ScoreRule) -> AttentionState:
    """Attention of the rows with one query over their own keys; output 0 and log-sum-exp -inf for others.

    q [sum of query_lens, Hq, D] float32 -> a state of as many queries.

    Scores are a sampled dense-dense product, the weighted sum of values an embedding bag: both take the keys by index.
    With a gather, which copies every key first, 64 rows of 448 to 512 keys took 137 ms instead of 43.
    """
    pieces = _pieces(rows, q.shape[1], reader)
    first, second = next(pieces, None), next(pieces, None)
    if first is not None and second is None and first.num_rows == q.shape[0]:
        return AttentionState(*_attend_chunks(q, reader, first, rule))
    running = RunningAttention(q.shape)
    for piece in chain(filter(None, (first, second)), pieces):  # one at a time: each may be tens of MB
        running.add(piece.query_ids, *_attend_chunks(q, reader, piece, rule))
    return running.state(q.dtype)


def _pieces(rows: AttentionRows, num_heads: int, reader: KvReader) -> Iterator[KeyChunks]:
    shape = (reader.num_blocks, reader.block_size, reader.num_kv_heads, reader.head_dim)
    num_keys = rows.once(("num_single_query_keys",), lambda: sum(keys.num_tokens for keys in rows.single_query_keys))
    if num_heads * num_keys > MAX_KEPT_SCORES:
        return key_chunks(rows, num_heads, shape)
    return iter(rows.once(("key_chunks", num_heads, *shape), lambda: tuple(key_chunks(rows, num_heads, shape))))


def _attend_chunks(
    q: torch.Tensor, reader: KvReader, chunks: KeyChunks, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Output [n, Hq, D] and log-sum-exp [n, Hq] over the keys of the chunks."""
    num_heads, head_dim = q.shape[1:]
    keys, values = reader.keys.vectors, reader.values.vectors
    queries = q.index_select(0, chunks.query_ids.index_select(0, chunks.chunk_rows)).view(-1, head_dim)
    # In place: a new product would copy the indices too, as many bytes as the scores.
    scores, products = chunks.scores, chunks.products
    scores = scores.copy_(chunks.bias) if rule.soft_cap is None else scores.zero_()
    torch.sparse.sampled_addmm(products, queries, keys.t(), beta=1.0, alpha=rule.scale, out=products)
    if rule.soft_cap is not None:  # of scores, not of the bias
        cap(scores, rule.soft_cap).add_(chunks.bias)
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


@dataclass(frozen=True, eq=False)
class KeyChunks:
    """n rows cut into c chunks of CHUNK_TOKENS keys; the chunks of a row follow one another.

    Where a row ends within a chunk its last key is repeated, so only keys of the row are read. `products` and `scores`
    share memory, which each layer of a step overwrites.
    """

    query_ids: torch.Tensor  # [n], int64: the query of each row
    chunk_rows: torch.Tensor  # [c], int64: 0 .. n - 1, the row of each chunk, rising
    row_offsets: torch.Tensor  # [n + 1], int64: first chunk of each row
    row_chunks: torch.Tensor  # [n, most chunks of a row], int64: the chunks of each row, then its first again
    chunks: torch.Tensor  # [c], int64: 0 .. c - 1
    bias: torch.Tensor  # [c, 1, CHUNK_TOKENS], float32: 0, REPEATED_BIAS where the key is repeated
    products: torch.Tensor  # [c * Hq, num_slots * Hkv], sparse CSR float32: a place for each key of a head
    # The parts of `products`, kept because asking it for them takes 5 us each time.
    scores: torch.Tensor  # [c, Hq, CHUNK_TOKENS], float32
    key_ids: torch.Tensor  # [c * Hq * CHUNK_TOKENS], int32 or int64: slot * Hkv + KV head
    key_offsets: torch.Tensor  # [c * Hq + 1], the dtype of key_ids

    @property
    def num_chunks(self) -> int:
        """c."""
        return self.chunk_rows.shape[0]

    @property
    def num_rows(self) -> int:
        """n."""
        return self.query_ids.shape[0]


def key_chunks(rows: AttentionRows, num_heads: int, cache_shape: Sequence[int]) -> Iterator[KeyChunks]:
    """The keys of all rows with one query, from the end of a shared prefix on, in pieces of about MAX_SCORES scores.

    A row may go on in the next piece. cache_shape: (num_blocks, block_size, Hkv, D).
    """
    own = [(keys.row, keys.start, keys.num_tokens) for keys in rows.single_query_keys]
    row_ids, starts, num_tokens = torch.tensor(own, dtype=torch.int64).view(-1, 3).t().contiguous()
    counts = (num_tokens + CHUNK_TOKENS - 1) // CHUNK_TOKENS
    chunk_rows = torch.arange(row_ids.shape[0]).repeat_interleave(counts)
    places = torch.arange(chunk_rows.shape[0]) - (counts.cumsum(0) - counts)[chunk_rows]
    positions = (starts[chunk_rows] + places * CHUNK_TOKENS)[:, None] + torch.arange(CHUNK_TOKENS)
    max_chunks = max(MAX_SCORES // (CHUNK_TOKENS * num_heads), 1)
    for first in range(0, chunk_rows.shape[0], max_chunks):
        piece = slice(first, first + max_chunks)
        first_row, last_row = int(chunk_rows[piece][0]), int(chunk_rows[piece][-1])
        local_rows = chunk_rows[piece] - first_row
        yield _make_piece(
            (rows, row_ids[first_row : last_row + 1]), local_rows, positions[piece], num_heads, cache_shape
        )


def _make_piece(
    chosen: tuple[AttentionRows, torch.Tensor],
    chunk_rows: torch.Tensor,
    positions: torch.Tensor,
    num_heads: int,
    cache_shape: Sequence[int],
) -> KeyChunks:
    """chosen: all rows, and which of them the piece holds [n] int64; chunk_rows [c] int64, into these;
    positions [c, CHUNK_TOKENS] int64, maybe past the end of the row.
    """
    rows, row_ids = chosen
    block_size, num_kv_heads = cache_shape[1:3]
    counts = torch.bincount(chunk_rows)
    rows_of_chunks = row_ids[chunk_rows]
    last = rows.seq_lens.long()[rows_of_chunks][:, None] - 1
    places = positions.minimum(last)
    blocks = rows.block_tables[rows_of_chunks].gather(1, places // block_size)
    slots = blocks.long() * block_size + places % block_size
    num_vectors = cache_shape[0] * block_size * num_kv_heads
    index_dtype = torch.int32 if max(num_vectors, slots.numel() * num_heads) < 2**31 else torch.int64
    heads = torch.arange(num_kv_heads, dtype=index_dtype).repeat_interleave(num_heads // num_kv_heads)
    key_ids = (slots * num_kv_heads).to(index_dtype)[:, None, :] + heads[:, None]
    bias = torch.zeros(slots.shape).masked_fill_(positions > last, REPEATED_BIAS)[:, None, :]
    num_chunks = chunk_rows.shape[0]
    offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0))
    columns = torch.arange(int(counts.max()))
    products = _sparse(
        torch.arange(num_chunks * num_heads + 1, dtype=index_dtype) * CHUNK_TOKENS,
        key_ids.flatten(),
        torch.empty(key_ids.numel()),
        (num_chunks * num_heads, num_vectors),
    )
    return KeyChunks(
        query_ids=rows.cu_seqlens_q.long()[row_ids],
        chunk_rows=chunk_rows,
        row_offsets=offsets,
        row_chunks=offsets[:-1, None] + columns.where(columns < counts[:, None], 0),
        chunks=torch.arange(num_chunks),
        bias=bias,
        products=products,
        scores=products.values().view(key_ids.shape),
        key_ids=products.col_indices(),
        key_offsets=products.crow_indices(),
    )


def _sparse(
    row_offsets: torch.Tensor, columns: torch.Tensor, values: torch.Tensor, shape: tuple[int, int]
) -> torch.Tensor:
    with warnings.catch_warnings():
        # PyTorch warns once a process that the layout is in beta; tests compare what is used of it with the reference.
        warnings.filterwarnings("ignore", message="Sparse CSR tensor support is in beta", category=UserWarning)
        return torch.sparse_csr_tensor(row_offsets, columns, values, shape, check_invariants=False)
