"""Plans one forward pass on the host, as arrays, and brings it to the device, also at addresses that never change.

A token that only the device knows yet stands in the plan as a negative number and is filled in there.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import torch

from engine.errors import EngineFatal
from engine.execution.prefix_groups import Gate, find_prefix_groups
from engine.models.decoder import ForwardBatch, LastTokens
from engine.staging import StagingBuffer
from kernels.operands import AttentionRows, PrefixGroup, Truncation

Int32 = npt.NDArray[np.int32]
Int64 = npt.NDArray[np.int64]
Array = npt.NDArray[Any]

_NO_TOKENS: Int64 = np.empty(0, dtype=np.int64)

# A step with chunks has room for one of so many tokens, on average: with more of them it runs eagerly.
TOKENS_OF_A_CHUNK = 64
LEAST_CHUNKS = 4
# Of a step's rows [n], see `Operations.choose_tokens`: temperatures float32 (0: greedy, and what follows is not read),
# seeds and positions int64, top_k int64, top_p and min_p float32.
Draws = tuple[npt.NDArray[Any], ...]
DrawTensors = tuple[torch.Tensor, torch.Tensor, torch.Tensor, Truncation]


class ForwardItem(NamedTuple):
    """Tokens to run for one sequence, and where its KV lies. A tuple: it is made for each sequence of each step."""

    token_ids: Sequence[int]  # not empty; one that only the device knows yet as `pending_token` writes it
    start: int  # position of token_ids[0]; everything before it is in KV
    block_table: Sequence[int]  # covers start + len(token_ids) tokens
    wants_logits: bool  # of its last token
    wants_hidden: bool = False  # the final-norm hidden states of all its tokens
    is_final: bool = True  # its last token is the sequence's last so far: no chunk with more to come
    wants_all_logits: bool = False  # of all its tokens: those behind the first are drafts


@dataclass(frozen=True, eq=False)
class PlannedRows:
    """`AttentionRows` before its arrays are on a device. Row i has the queries of one item."""

    block_tables: Int32  # [num_rows, max_blocks], 0, the null block, past the blocks of a row
    cu_seqlens_q: Int32  # [num_rows + 1], starts at 0
    seq_lens: Int32  # [num_rows], tokens in KV after this step
    prefix_groups: tuple[PrefixGroup, ...]

    @property
    def arrays(self) -> tuple[Int32, Int32, Int32]:
        """What a device needs, in the order `on_device` takes it back."""
        return self.block_tables, self.cu_seqlens_q, self.seq_lens

    def on_device(self, tensors: Iterator[torch.Tensor]) -> AttentionRows:
        """The rows over the next of `tensors`, one for each of `arrays`."""
        return AttentionRows(
            block_tables=next(tensors),
            cu_seqlens_q=next(tensors),
            seq_lens=next(tensors),
            query_lens=tuple(np.diff(self.cu_seqlens_q).tolist()),
            kv_lens=tuple(self.seq_lens.tolist()),
            prefix_groups=self.prefix_groups,
        )


@dataclass(frozen=True, eq=False)
class PlannedBatch:
    """`ForwardBatch` before its arrays are on a device: T tokens, those of rows with one query (decode) first."""

    token_ids: Int64  # [T]
    positions: Int64  # [T]
    slot_mapping: Int64  # [T], block_id * block_size + offset
    logits_indices: Int64  # [S], into T or the rows of `last`, in the order of the items; several for one with drafts
    hidden_indices: Int64  # [W], into T, item after item
    hidden_lens: tuple[int, ...]  # tokens of each item that wants hidden states; W in all
    decode: PlannedRows | None  # None: no row has one query
    prefill: PlannedRows | None  # None: every row has
    last: PlannedRows | None = None  # see `LastTokens`
    last_indices: Int64 = field(default_factory=_NO_TOKENS.copy)

    @property
    def num_tokens(self) -> int:
        """T."""
        return int(self.token_ids.shape[0])

    @property
    def is_plain(self) -> bool:
        """Whether logits alone are wanted of each item, and no prefixes are shared."""
        parts = [part for part in (self.decode, self.prefill) if part is not None]
        if self.hidden_lens or self.last is not None or any(part.prefix_groups for part in parts):
            return False
        return int(self.logits_indices.shape[0]) == sum(int(part.seq_lens.shape[0]) for part in parts)

    @property
    def arrays(self) -> tuple[Array, ...]:
        """What a device needs, in the order `on_device` takes it back."""
        own = (self.token_ids, self.positions, self.slot_mapping, self.logits_indices, self.hidden_indices)
        decode, prefill = (() if rows is None else rows.arrays for rows in (self.decode, self.prefill))
        last = () if self.last is None else (*self.last.arrays, self.last_indices)
        return (*own, *decode, *prefill, *last)

    def on_device(self, tensors: Sequence[torch.Tensor]) -> ForwardBatch:
        """The batch over `tensors`, one for each of `arrays`."""
        following = iter(tensors)
        return ForwardBatch(
            token_ids=next(following),
            positions=next(following),
            slot_mapping=next(following),
            logits_indices=next(following),
            hidden_indices=next(following),
            hidden_lens=self.hidden_lens,
            decode=None if self.decode is None else self.decode.on_device(following),
            prefill=None if self.prefill is None else self.prefill.on_device(following),
            num_decode_tokens=0 if self.decode is None else int(self.decode.seq_lens.shape[0]),
            last=None if self.last is None else LastTokens(self.last.on_device(following), next(following)),
        )


@dataclass(frozen=True, eq=False)
class _Part:
    """Items that share an attention call."""

    item_ids: Int64  # which items, in the order of the rows
    token_ids: Int64  # [tokens]
    positions: Int64  # [tokens]
    slots: Int64  # [tokens]
    rows: PlannedRows | None  # None: no items


def plan_batch(
    items: Sequence[ForwardItem],
    block_size: int,
    gates: tuple[Gate, Gate] | None = None,
    *,
    narrows: bool = False,
) -> PlannedBatch:
    """Plan one forward pass over `items`, which must not be empty. Nothing touches a device.

    Rows with one query go first, so that each attention kernel works on one contiguous run of tokens.
    gates: for rows with one query, and for chunks. Rows that share a prefix which passes the gate become neighbours and
    are pointed out to the kernels as a group. None: no groups, rows in the order of the items.
    narrows: where there are chunks of which only the last logits are wanted, the last layer ends with `LastTokens`.
    """
    decode_gate, prefill_gate = gates or (None, None)
    lens = np.fromiter((len(item.token_ids) for item in items), np.int64, len(items))
    decode = _part(items, np.flatnonzero(lens == 1), block_size, decode_gate)
    prefill = _part(items, np.flatnonzero(lens != 1), block_size, prefill_gate)
    item_ids = np.concatenate((decode.item_ids, prefill.item_ids))
    last_indices = np.cumsum(lens[item_ids]) - 1
    last_token, row = np.empty(len(items), dtype=np.int64), np.empty(len(items), dtype=np.int64)
    last_token[item_ids], row[item_ids] = last_indices, np.arange(len(items))
    _, _, _, wants_logits, wants_hidden, _, wants_all = zip(*items, strict=True)
    drafted = {i: int(lens[i]) for i in np.flatnonzero(wants_all).tolist()}
    wanted = np.flatnonzero(wants_logits)  # columns: no item is looked at by itself
    hidden = {i: int(lens[i]) for i in np.flatnonzero(wants_hidden).tolist()}
    narrows = narrows and prefill.rows is not None and not hidden and not drafted
    last = _last_rows(decode.rows, prefill.rows) if narrows and prefill.rows is not None else None
    logits_indices = (last_token if last is None else row)[wanted]
    if drafted:
        ends = [(last_token[i] + 1, drafted.get(i, 1)) for i in wanted.tolist()]
        logits_indices = np.concatenate([np.arange(end - count, end) for end, count in ends])
    hidden_tokens = [np.arange(last_token[i] + 1 - count, last_token[i] + 1) for i, count in hidden.items()]
    return PlannedBatch(
        token_ids=np.concatenate((decode.token_ids, prefill.token_ids)),
        positions=np.concatenate((decode.positions, prefill.positions)),
        slot_mapping=np.concatenate((decode.slots, prefill.slots)),
        logits_indices=logits_indices,
        hidden_indices=np.concatenate([_NO_TOKENS, *hidden_tokens]),
        hidden_lens=tuple(hidden.values()),
        decode=decode.rows,
        prefill=prefill.rows,
        last=last,
        last_indices=last_indices,
    )


def _last_rows(decode: PlannedRows | None, prefill: PlannedRows) -> PlannedRows:
    """The rows of both with the last of their queries alone."""
    parts = [rows for rows in (decode, prefill) if rows is not None]
    seq_lens = np.concatenate([rows.seq_lens for rows in parts])
    tables = np.zeros((seq_lens.shape[0], max(rows.block_tables.shape[1] for rows in parts)), dtype=np.int32)
    groups: list[PrefixGroup] = []
    first = 0
    for rows in parts:
        end = first + rows.seq_lens.shape[0]
        tables[first:end, : rows.block_tables.shape[1]] = rows.block_tables
        groups += (group._replace(first_row=group.first_row + first) for group in rows.prefix_groups)
        first = end
    return PlannedRows(tables, np.arange(first + 1, dtype=np.int32), seq_lens, tuple(groups))


def _part(all_items: Sequence[ForwardItem], item_ids: Int64, block_size: int, gate: Gate | None) -> _Part:
    if not item_ids.size:
        return _Part(_NO_TOKENS, _NO_TOKENS, _NO_TOKENS, _NO_TOKENS, None)
    items = all_items if len(item_ids) == len(all_items) else [all_items[i] for i in item_ids.tolist()]
    token_ids, first_positions, block_tables, *_ = zip(*items, strict=True)
    starts = np.array(first_positions, dtype=np.int64)
    query_lens = np.fromiter(map(len, token_ids), np.int64, len(items))
    tables = _block_tables(block_tables, -(-(starts + query_lens) // block_size))
    groups: tuple[PrefixGroup, ...] = ()
    if gate is not None:
        order, groups = find_prefix_groups(tables, starts // block_size, block_size, gate)
        if groups:
            token_ids, item_ids = tuple(token_ids[i] for i in order), item_ids[order]
            starts, query_lens, tables = starts[order], query_lens[order], tables[order]
    cu_seqlens = np.concatenate(([0], np.cumsum(query_lens)))
    token_rows = np.repeat(np.arange(len(items)), query_lens)
    positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[token_rows]
    blocks = tables[token_rows, positions // block_size].astype(np.int64)
    rows = PlannedRows(tables, cu_seqlens.astype(np.int32), (starts + query_lens).astype(np.int32), groups)
    tokens = np.fromiter(chain.from_iterable(token_ids), np.int64, int(cu_seqlens[-1]))
    return _Part(item_ids, tokens, positions, blocks * block_size + positions % block_size, rows)


def _block_tables(block_tables: Sequence[Sequence[int]], num_blocks: Int64) -> Int32:
    """[num_items, most blocks], 0, the null block, past the blocks of an item. Most are arrays: all are joined."""
    cut = [table[:count] for table, count in zip(block_tables, num_blocks.tolist(), strict=True)]
    joined = b"".join(table if isinstance(table, array) else array("i", table) for table in cut)
    tables = np.zeros((len(cut), int(num_blocks.max())), dtype=np.int32)
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = np.frombuffer(joined, dtype=np.int32)
    return tables


def pending_token(row: int) -> int:
    """The number, no token id, that a plan has for the token that row `row` of the step before will choose."""
    return -1 - row


@torch.inference_mode()
def fill_in(token_ids: torch.Tensor, chosen: torch.Tensor) -> None:
    """Replace what `pending_token` wrote. token_ids [T] int64, in place; chosen [S] int64, of the step before.

    Five small operations on the device; the host waits for none.
    """
    rows = token_ids.bitwise_not().clamp_(min=0)  # ~x is -1 - x
    torch.where(token_ids < 0, chosen.index_select(0, rows), token_ids, out=token_ids)


class GraphKind(NamedTuple):
    """What a graph has room for."""

    chunk_tokens: int  # of all chunks together; 0: it is a decode step's
    num_rows: int  # with one query
    row_tokens: int  # most tokens of a row in KV

    @property
    def max_chunks(self) -> int:
        """Most chunks."""
        return max(self.chunk_tokens // TOKENS_OF_A_CHUNK, LEAST_CHUNKS) if self.chunk_tokens else 0

    @property
    def num_choices(self) -> int:
        """Rows of logits."""
        return self.num_rows + self.max_chunks

    @property
    def num_tokens(self) -> int:
        """Tokens of the step, padding included."""
        return self.num_rows + self.chunk_tokens

    @property
    def lens(self) -> tuple[int, ...]:
        """What a capture is told: bounds of rows' lengths, and chunks of which the last, padding, has all tokens."""
        chunks = (*[0] * self.max_chunks, self.chunk_tokens, *[0] * (self.max_chunks + 1)) if self.chunk_tokens else ()
        return (*[self.row_tokens] * self.num_rows, *chunks)

    def holds(self, wanted: GraphKind, num_chunks: int) -> bool:
        """Whether a step of so many tokens, rows and chunks goes into it."""
        is_alike = bool(self.chunk_tokens) == bool(wanted.chunk_tokens) and num_chunks <= self.max_chunks
        return is_alike and all(mine >= other for mine, other in zip(self, wanted, strict=True))


class ChunkBuffers:
    """Inputs of steps with chunks at addresses that never change: the tokens of rows with one query and their padding,
    then those of the chunks and theirs, which is a last chunk that sees no key and writes to the null block.
    """

    def __init__(self, kinds: Sequence[GraphKind], max_blocks: int, device: torch.device) -> None:
        """Room for each of these kinds."""
        num_choices, num_rows = max(kind.num_choices for kind in kinds), max(kind.num_rows for kind in kinds)
        num_chunks = max(kind.max_chunks for kind in kinds) + 1
        self._staging = StagingBuffer.pair(device)
        self._tokens = torch.zeros(  # ids, positions, slots; each line starts at a multiple of 16 bytes
            (3, -(-max(kind.num_tokens for kind in kinds) // 2) * 2), dtype=torch.int64, device=device
        )
        # Logits indices; of draws seeds, positions and top_k; then temperatures, top_p and min_p.
        width = -(-num_choices // 4) * 4
        self._choices = torch.zeros((4, width), dtype=torch.int64, device=device)
        self._shares = torch.zeros((3, width), dtype=torch.float32, device=device)
        self._row_lens = torch.ones(num_rows, dtype=torch.int32, device=device)
        self._chunk_lens = torch.zeros(num_chunks, dtype=torch.int32, device=device)
        self._chunk_starts = torch.zeros(num_chunks + 1, dtype=torch.int32, device=device)
        self._row_starts = torch.arange(num_rows + 1, dtype=torch.int32, device=device)
        self._tables = torch.zeros((num_rows + num_chunks, max_blocks), dtype=torch.int32, device=device)

    def clear(self, kind: GraphKind) -> None:
        """Nothing but padding."""
        for tensor in (self._tokens, self._choices, self._shares, self._chunk_lens, self._chunk_starts):
            tensor.zero_()
        self._row_lens.fill_(1)
        self._tables.zero_()
        self._chunk_starts[kind.max_chunks + 1 :].fill_(kind.chunk_tokens)

    def fill(
        self, planned: PlannedBatch, kind: GraphKind, chosen: torch.Tensor | None, draws: Draws | None
    ) -> tuple[int, ...]:
        """Write a step and padding; returns what its run is told. chosen, draws: see `StepExecutor.execute`."""
        rows, chunks = planned.decode, planned.prefill
        if chunks is None or not planned.is_plain:
            raise EngineFatal("a step without chunks, or with more than logits, does not go into a graph with chunks")
        num_rows = 0 if rows is None else int(rows.seq_lens.shape[0])
        num_chunks, size = int(chunks.seq_lens.shape[0]), kind.num_rows
        row_lens = np.ones(size, dtype=np.int32)
        chunk_lens = np.zeros(kind.max_chunks + 1, dtype=np.int32)
        starts = np.full(kind.max_chunks + 2, chunks.cu_seqlens_q[-1], dtype=np.int32)
        chunk_lens[:num_chunks], starts[:num_chunks], starts[-1] = chunks.seq_lens, chunks.cu_seqlens_q[:-1], kind[0]
        width = max(part.block_tables.shape[1] for part in (rows, chunks) if part is not None)
        tables = np.zeros((size + kind.max_chunks + 1, width), dtype=np.int32)
        tables[size : size + num_chunks, : chunks.block_tables.shape[1]] = chunks.block_tables
        if rows is not None:
            row_lens[:num_rows] = rows.seq_lens
            tables[:num_rows, : rows.block_tables.shape[1]] = rows.block_tables
        tokens, choices, shares = _padded(planned, num_rows, kind, draws)
        staged = next(self._staging).send((tokens, choices, shares, row_lens, chunk_lens, starts, tables))
        self._take(staged)
        if chosen is not None:
            fill_in(self._tokens[0, :size], chosen)
        return (*row_lens.tolist(), *np.diff(starts).tolist(), *chunk_lens.tolist())

    def _take(self, staged: Sequence[torch.Tensor]) -> None:
        places = (self._tokens, self._choices, self._shares, self._row_lens, self._chunk_lens)
        for place, values in zip((*places, self._chunk_starts, self._tables), staged, strict=True):
            target = place[: values.shape[0]] if values.dim() == 1 else place[: values.shape[0], : values.shape[1]]
            target.copy_(values)

    def draws(self, size: int) -> DrawTensors:
        """Of the first rows of logits, as `Operations.choose_tokens` takes them."""
        seeds, positions, top_k = self._choices[1:, :size]
        temperatures, top_p, min_p = self._shares[:, :size]
        return temperatures, seeds, positions, Truncation(top_k, top_p, min_p)

    def batch(self, kind: GraphKind, lens: tuple[int, ...]) -> ForwardBatch:
        """The batch of a kind. lens: what `fill` returned, or `GraphKind.lens`."""
        size, num_chunks = kind.num_rows, kind.max_chunks + 1
        token_ids, positions, slot_mapping = self._tokens[:, : kind.num_tokens]
        return ForwardBatch(
            token_ids=token_ids,
            positions=positions,
            slot_mapping=slot_mapping,
            logits_indices=self._choices[0, : kind.num_choices],
            hidden_indices=self._choices[0, :0],
            hidden_lens=(),
            decode=AttentionRows(
                block_tables=self._tables[:size],
                cu_seqlens_q=self._row_starts[: size + 1],
                seq_lens=self._row_lens[:size],
                query_lens=(1,) * size,
                kv_lens=lens[:size],
            ),
            prefill=AttentionRows(
                block_tables=self._tables[size : size + num_chunks],
                cu_seqlens_q=self._chunk_starts[: num_chunks + 1],
                seq_lens=self._chunk_lens[:num_chunks],
                query_lens=lens[size : size + num_chunks],
                kv_lens=lens[size + num_chunks :],
            ),
            num_decode_tokens=size,
        )


def _padded(
    planned: PlannedBatch, num_rows: int, kind: GraphKind, draws: Draws | None
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64], npt.NDArray[np.float32]]:
    """Tokens (ids, positions, slots), choices (logits indices, seeds, positions, top_k), shares (temperatures, top_p,
    min_p); rows and chunks are each followed by their padding.
    """
    first, end = kind.num_rows, kind.num_rows + planned.num_tokens - num_rows
    tokens = np.zeros((3, kind.num_tokens), dtype=np.int64)
    for line, values in zip(tokens, (planned.token_ids, planned.positions, planned.slot_mapping), strict=True):
        line[:num_rows], line[first:end] = values[:num_rows], values[num_rows:]
    indices, choices = planned.logits_indices, np.zeros((4, kind.num_choices), dtype=np.int64)
    count = indices.shape[0]
    choices[0, :count] = np.where(indices < num_rows, indices, indices + first - num_rows)
    shares = np.zeros((3, kind.num_choices), dtype=np.float32)
    if draws is not None:
        temperatures, seeds, positions, top_k, top_p, min_p = draws
        choices[1:, :count], shares[:, :count] = (seeds, positions, top_k), (temperatures, top_p, min_p)
    return tokens, choices, shares
