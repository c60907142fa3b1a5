"""From items to the arrays of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from engine.execution.forward_item import ForwardItem
from engine.execution.planned_batch import PlannedBatch
from engine.execution.planned_rows import PlannedRows
from engine.execution.prefix_groups import Gate, find_prefix_groups
from kernels.attention_types import PrefixGroup

Int64 = npt.NDArray[np.int64]

_NO_TOKENS: Int64 = np.empty(0, dtype=np.int64)


@dataclass(frozen=True, eq=False)
class _Part:
    """Items that share an attention call."""

    item_ids: list[int]  # which items, in the order of the rows
    token_ids: Int64  # [tokens]
    positions: Int64  # [tokens]
    slots: Int64  # [tokens]
    rows: PlannedRows | None  # None: no items


def plan_batch(items: Sequence[ForwardItem], block_size: int, gates: tuple[Gate, Gate] | None = None) -> PlannedBatch:
    """The plan of one forward pass over `items`, which must not be empty: host only, nothing touches a device.

    Rows with one query go first, so that each attention kernel works on one contiguous run of tokens.
    gates: for rows with one query and for chunks. Rows whose blocks begin alike and that pass become neighbours and are
    pointed out to the kernels; None: every row by itself, in the order of the items.
    """
    decode_gate, prefill_gate = gates or (None, None)
    is_decode = [len(item.token_ids) == 1 for item in items]
    decode_ids = [i for i, single in enumerate(is_decode) if single]
    prefill_ids = [i for i, single in enumerate(is_decode) if not single]
    decode = _part(items, decode_ids, block_size, decode_gate)
    prefill = _part(items, prefill_ids, block_size, prefill_gate)
    item_ids = [*decode.item_ids, *prefill.item_ids]
    last_token = np.empty(len(items), dtype=np.int64)
    last_token[item_ids] = np.cumsum([len(items[i].token_ids) for i in item_ids]) - 1
    wanted = [i for i, item in enumerate(items) if item.wants_logits]
    hidden = {i: len(item.token_ids) for i, item in enumerate(items) if item.wants_hidden}
    hidden_tokens = [np.arange(last_token[i] + 1 - count, last_token[i] + 1) for i, count in hidden.items()]
    return PlannedBatch(
        token_ids=np.concatenate((decode.token_ids, prefill.token_ids)),
        positions=np.concatenate((decode.positions, prefill.positions)),
        slot_mapping=np.concatenate((decode.slots, prefill.slots)),
        logits_indices=last_token[wanted],
        hidden_indices=np.concatenate([_NO_TOKENS, *hidden_tokens]),
        hidden_lens=tuple(hidden.values()),
        decode=decode.rows,
        prefill=prefill.rows,
    )


def _part(all_items: Sequence[ForwardItem], item_ids: list[int], block_size: int, gate: Gate | None) -> _Part:
    if not item_ids:
        return _Part([], _NO_TOKENS, _NO_TOKENS, _NO_TOKENS, None)
    items = [all_items[i] for i in item_ids]
    starts = np.array([item.start for item in items], dtype=np.int64)
    query_lens = np.array([len(item.token_ids) for item in items], dtype=np.int64)
    tables = _block_tables(items, -(-(starts + query_lens) // block_size))
    groups: tuple[PrefixGroup, ...] = ()
    if gate is not None:
        order, groups = find_prefix_groups(tables, starts // block_size, block_size, gate)
        if groups:
            items, item_ids = [items[i] for i in order], [item_ids[i] for i in order]
            starts, query_lens, tables = starts[order], query_lens[order], tables[order]
    cu_seqlens = np.concatenate(([0], np.cumsum(query_lens)))
    token_rows = np.repeat(np.arange(len(items)), query_lens)
    positions = np.arange(cu_seqlens[-1]) + (starts - cu_seqlens[:-1])[token_rows]
    blocks = tables[token_rows, positions // block_size].astype(np.int64)
    rows = PlannedRows(tables, cu_seqlens.astype(np.int32), (starts + query_lens).astype(np.int32), groups)
    token_ids = np.fromiter(chain.from_iterable(item.token_ids for item in items), np.int64, int(cu_seqlens[-1]))
    return _Part(item_ids, token_ids, positions, blocks * block_size + positions % block_size, rows)


def _block_tables(items: Sequence[ForwardItem], num_blocks: Int64) -> npt.NDArray[np.int32]:
    """[num_items, most blocks], 0, the null block, past the blocks of an item."""
    tables = np.zeros((len(items), int(num_blocks.max())), dtype=np.int32)
    used = (item.block_table[:count] for item, count in zip(items, num_blocks.tolist(), strict=True))
    tables[np.arange(tables.shape[1]) < num_blocks[:, None]] = np.fromiter(
        chain.from_iterable(used), np.int32, int(num_blocks.sum())
    )
    return tables
