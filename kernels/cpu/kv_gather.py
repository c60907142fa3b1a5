"""Plans how the single-query rows of a step read the paged cache in a few large gathers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from kernels.operands import AttentionRows, KeyRange

# A row's keys are cut at absolute multiples of this many tokens, whatever its neighbours, so that one long row neither
# needs a buffer of its own size nor leaves all but a few cores idle.
SEGMENT_TOKENS = 2048
# Below this many keys a gather is launch overhead, not work: padding it is cheaper than splitting it.
SMALL_GATHER_TOKENS = 1024


def gather_plan(rows: AttentionRows, block_size: int, max_tokens: int) -> KvGatherPlan:
    """How to read the own keys of the single-query rows; made for the first layer of a step and kept for the others.

    block_size in tokens; max_tokens bounds one gather.
    """
    return rows.once(
        ("gather_plan", block_size, max_tokens),
        lambda: KvGatherPlan.build(rows.block_tables, rows.single_query_keys, block_size, max_tokens),
    )


@dataclass(frozen=True, eq=False)
class KvGather:
    """Ranges of keys of single-query rows, padded to one length so that one attention call takes them all."""

    query_ids: torch.Tensor  # [num_ranges], int64: the query (row of q) each range belongs to, no two the same
    block_ids: torch.Tensor  # [num_ranges * num_blocks], int64: blocks of the ranges, padded with the null block
    num_tokens: int  # keys per range, padding included: num_blocks * block_size
    padding_ids: torch.Tensor  # [num_padding], int64: which of the num_ranges * num_tokens keys lie outside a range
    mask: torch.Tensor | None  # [num_ranges, 1, 1, num_tokens], float32: -inf at padding, else 0; None: no padding

    @property
    def num_ranges(self) -> int:
        """Number of key ranges."""
        return self.query_ids.shape[0]


@dataclass(frozen=True, eq=False)
class KvGatherPlan:
    """The gathers of one step; the same for every layer, so it is made once and kept by `AttentionRows`.

    Rows of similar length share a gather: at most a fifth of the blocks it reads are padding (a quarter of the real
    ones), except in gathers of no more than 1024 keys. A row occurs once in a gather, and its segments in rising order.
    """

    gathers: tuple[KvGather, ...]
    num_segments: int  # segments of the longest row; 1: no row was cut

    @classmethod
    def build(
        cls, block_tables: torch.Tensor, keys: Sequence[KeyRange], block_size: int, max_tokens: int
    ) -> KvGatherPlan:
        """Plan the reading of some rows' keys.

        block_tables [num_rows, max_blocks] int32; keys: not empty, a row at most once; block_size in tokens;
        max_tokens bounds the keys of one gather, padding included (one block is always allowed).
        """
        segment_tokens = max(min(SEGMENT_TOKENS, max_tokens) // block_size, 1) * block_size
        ranges = sorted(_segments(keys, segment_tokens, block_size), key=lambda item: (item.segment, -item.num_tokens))
        groups = _group(ranges, block_size, max_tokens)
        return cls(
            gathers=tuple(_gather(group, block_tables, block_size) for group in groups),
            num_segments=max((item.segment + 1 for item in ranges), default=0),
        )


def _segments(keys: Sequence[KeyRange], segment_tokens: int, block_size: int) -> Iterator[KeyRange]:
    for row, query, start_seen, end, _, _ in keys:
        num_skipped = start_seen % block_size  # of the block in which a window begins
        first = start_seen - num_skipped
        # From the first key to a multiple, then from multiple to multiple.
        starts = [first, *range((first // segment_tokens + 1) * segment_tokens, end, segment_tokens)]
        for segment, (start, stop) in enumerate(zip(starts, [*starts[1:], end], strict=True)):
            yield KeyRange(row, query, start, stop, segment, 0 if segment else num_skipped)


def _group(ranges: list[KeyRange], block_size: int, max_tokens: int) -> list[list[KeyRange]]:
    groups: list[list[KeyRange]] = []
    num_blocks = padded_len = 0
    for item in ranges:  # longest first within a segment, so the first of a group sets its padded length
        item_blocks = -(-item.num_tokens // block_size)
        padded = (len(groups[-1]) + 1) * padded_len if groups else 0
        too_large = padded > max_tokens
        wasteful = padded > SMALL_GATHER_TOKENS and 5 * (num_blocks + item_blocks) * block_size < 4 * padded
        if not groups or groups[-1][-1].segment != item.segment or too_large or wasteful:
            groups.append([])
            num_blocks, padded_len = 0, item_blocks * block_size
        groups[-1].append(item)
        num_blocks += item_blocks
    return groups


def _gather(group: list[KeyRange], block_tables: torch.Tensor, block_size: int) -> KvGather:
    num_blocks = -(-group[0].num_tokens // block_size)
    rows = torch.tensor([item.row for item in group])
    lens = torch.tensor([item.num_tokens for item in group])
    first_blocks = torch.tensor([item.start // block_size for item in group])
    columns = first_blocks[:, None] + torch.arange(num_blocks)
    # Past a row's blocks the table's last entry is read: any block will do, since its keys are padding.
    blocks = block_tables.index_select(0, rows).gather(1, columns.clamp_(max=block_tables.shape[1] - 1))
    places = torch.arange(num_blocks * block_size)
    outside = (places >= lens[:, None]) | (places < torch.tensor([[item.num_skipped] for item in group]))
    padding_ids = outside.flatten().nonzero().flatten()
    mask = None
    if padding_ids.shape[0] > 0:
        mask = torch.zeros(outside.shape).masked_fill_(outside, -torch.inf)[:, None, None, :]
    return KvGather(
        query_ids=torch.tensor([item.query for item in group]),
        block_ids=blocks.flatten().long(),
        num_tokens=num_blocks * block_size,
        padding_ids=padding_ids,
        mask=mask,
    )
