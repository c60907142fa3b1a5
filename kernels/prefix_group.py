"""Neighbouring rows of one attention call whose sequences begin with the same blocks."""

from __future__ import annotations

from typing import NamedTuple


class PrefixGroup(NamedTuple):
    """Rows `first_row` .. `first_row + num_rows - 1` of an `AttentionRows` begin with the same blocks, which hold
    `num_tokens` tokens.

    Every query of these rows sees all of these keys: they end before the first query of each member. So attention over
    them may be computed for all members at once, each key read once, and merged with each member's attention over the
    keys from `num_tokens` on (Hydragen, arXiv 2402.05099). An offer, not an order: the result is the same without it,
    up to rounding.
    """

    first_row: int  # index into the rows
    num_rows: int  # >= 2
    num_tokens: int  # > 0, a multiple of block_size, <= kv_lens[i] - query_lens[i] of each member i
