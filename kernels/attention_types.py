"""The rows one attention call works on."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, TypeVar, cast

import torch

Plan = TypeVar("Plan")


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


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Requests of one step that attend together, with the host-known bounds that keep a launch free of syncs.

    Row i owns queries `cu_seqlens_q[i]:cu_seqlens_q[i+1]`; they are the last queries of its sequence, whose
    `seq_lens[i]` keys (these queries' own included) are already in the paged cache. A decode row has one query.
    """

    block_tables: torch.Tensor  # [num_rows, max_blocks], int32; entries past a row's blocks: any of the pool's
    cu_seqlens_q: torch.Tensor  # [num_rows + 1], int32, starts at 0
    seq_lens: torch.Tensor  # [num_rows], int32, tokens in KV after this step, >= number of queries of the row
    query_lens: tuple[int, ...]  # the same as cu_seqlens_q's differences, on the host
    # The same as seq_lens, on the host. On a GPU these may be bounds of them: a captured launch is sized once for all.
    kv_lens: tuple[int, ...]
    # Rows that begin with the same blocks: disjoint, in rising order of rows. Not every row is in one, none is in two.
    prefix_groups: tuple[PrefixGroup, ...] = ()

    @property
    def num_rows(self) -> int:
        """Number of requests."""
        return len(self.kv_lens)

    @property
    def num_queries(self) -> int:
        """Number of query tokens over all rows."""
        return sum(self.query_lens)

    @cached_property
    def own_starts(self) -> tuple[int, ...]:
        """Of each row, the first key that is not of its group's prefix: 0 where the row is in no group."""
        starts = [0] * self.num_rows
        for group in self.prefix_groups:
            starts[group.first_row : group.first_row + group.num_rows] = [group.num_tokens] * group.num_rows
        return tuple(starts)

    def once(self, key: tuple[str | int, ...], make: Callable[[], Plan]) -> Plan:
        """What `make` returned to the first layer that asked for `key`, for all layers of the step."""
        if key not in self._plans:
            self._plans[key] = make()
        return cast("Plan", self._plans[key])

    @cached_property
    def _plans(self) -> dict[tuple[str | int, ...], object]:
        return {}
