"""How the single-query rows of a step read the paged cache in a few large gathers."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import torch

from kernels.kv_gather import KvGather

# A row's keys are cut at multiples of this many tokens, so that one long row neither needs a buffer of its own size nor
# keeps all but a few cores idle. Cuts at absolute positions: where a row is cut does not depend on its neighbours.
SEGMENT_TOKENS = 2048
# Below this many keys a gather is launch overhead, not work: padding it is cheaper than splitting it.
SMALL_GATHER_TOKENS = 1024


class _Range(NamedTuple):
    segment: int
    row: int
    query: int
    num_tokens: int


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
        cls,
        block_tables: torch.Tensor,
        query_lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        block_size: int,
        max_tokens: int,
    ) -> KvGatherPlan:
        """Plan the rows that have one query and at least one key.

        block_tables [num_rows, max_blocks] int32; block_size in tokens; max_tokens bounds the keys of one gather,
        padding included (one block is always allowed).
        """
        segment_tokens = max(min(SEGMENT_TOKENS, max_tokens) // block_size, 1) * block_size
        ranges = sorted(
            _ranges(query_lens, kv_lens, segment_tokens),
            key=lambda item: (item.segment, -item.num_tokens),
        )
        groups = _group(ranges, block_size, max_tokens)
        return cls(
            gathers=tuple(_gather(group, block_tables, block_size, segment_tokens) for group in groups),
            num_segments=max((item.segment + 1 for item in ranges), default=0),
        )


def _ranges(query_lens: tuple[int, ...], kv_lens: tuple[int, ...], segment_tokens: int) -> Iterator[_Range]:
    query = 0
    for row, (query_len, kv_len) in enumerate(zip(query_lens, kv_lens, strict=True)):
        if query_len == 1:
            for segment, start in enumerate(range(0, kv_len, segment_tokens)):
                yield _Range(segment, row, query, min(segment_tokens, kv_len - start))
        query += query_len


def _group(ranges: list[_Range], block_size: int, max_tokens: int) -> list[list[_Range]]:
    groups: list[list[_Range]] = []
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


def _gather(group: list[_Range], block_tables: torch.Tensor, block_size: int, segment_tokens: int) -> KvGather:
    device = block_tables.device
    num_blocks = -(-group[0].num_tokens // block_size)
    first_block = group[0].segment * (segment_tokens // block_size)
    rows = torch.tensor([item.row for item in group], device=device)
    lens = torch.tensor([item.num_tokens for item in group], device=device)
    blocks = block_tables[:, first_block : first_block + num_blocks].index_select(0, rows)
    past_end = torch.arange(num_blocks * block_size, device=device) >= lens[:, None]
    padding_ids = past_end.flatten().nonzero().flatten()
    mask = None
    if padding_ids.shape[0] > 0:
        mask = torch.zeros(past_end.shape, device=device).masked_fill_(past_end, -torch.inf)[:, None, None, :]
    return KvGather(
        query_ids=torch.tensor([item.query for item in group], device=device),
        block_ids=blocks.flatten().long(),
        num_tokens=num_blocks * block_size,
        padding_ids=padding_ids,
        mask=mask,
    )
