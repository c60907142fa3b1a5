"""Which blocks of keys the single-query rows of a step attend to, and where these lie in the cache."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.deterministic.key_blocks import KEY_BLOCK_TOKENS


@dataclass(frozen=True, eq=False)
class KeyBlockPlan:
    """Pairs of a row and one of its blocks of keys; the same for every layer.

    All first blocks come before all second ones, and so on; the rows with most blocks first, so that the pairs of the
    j-th block are those of the first `rows_with_block[j]` rows of `row_ids`.
    """

    row_ids: torch.Tensor  # [num_rows], int64: rows that have keys, by falling number of blocks
    rows_with_block: tuple[int, ...]  # for each block number, how many rows have it
    places: torch.Tensor  # [num_pairs], int64: each pair's row, as its place in row_ids
    slots: torch.Tensor  # [num_pairs, KEY_BLOCK_TOKENS], int64: past a row's end the row's first token
    mask: torch.Tensor  # [num_pairs, 1, 1, KEY_BLOCK_TOKENS], float32: -inf past a row's end, else 0

    @classmethod
    def build(cls, block_tables: torch.Tensor, kv_lens: Sequence[int], block_size: int) -> KeyBlockPlan:
        """block_tables [num_rows, max_blocks] int32; kv_lens: keys of each row; block_size of the cache in tokens."""
        num_blocks = [-(-kv_len // KEY_BLOCK_TOKENS) for kv_len in kv_lens]
        order = sorted((row for row, count in enumerate(num_blocks) if count), key=lambda row: -num_blocks[row])
        longest = num_blocks[order[0]] if order else 0
        rows_with_block = tuple(sum(num_blocks[row] > block for row in order) for block in range(longest))
        places = [place for count in rows_with_block for place in range(count)]
        starts = [block * KEY_BLOCK_TOKENS for block, count in enumerate(rows_with_block) for _ in range(count)]
        row_ids = torch.tensor(order, dtype=torch.int64)
        place_ids = torch.tensor(places, dtype=torch.int64)
        positions = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(KEY_BLOCK_TOKENS)
        pair_rows = row_ids.index_select(0, place_ids)
        is_past_end = positions >= torch.tensor(kv_lens, dtype=torch.int64).index_select(0, pair_rows)[:, None]
        # A key past the end is masked, but must be finite: 0 * NaN is NaN. The row's first is as finite as the row.
        positions.masked_fill_(is_past_end, 0)
        blocks = block_tables.long().index_select(0, pair_rows).gather(1, positions // block_size)
        slots = blocks.mul_(block_size).add_(positions % block_size)
        mask = torch.zeros(is_past_end.shape).masked_fill_(is_past_end, -torch.inf)
        return cls(row_ids, rows_with_block, place_ids, slots, mask[:, None, None, :])
