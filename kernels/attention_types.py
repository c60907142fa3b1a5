"""The rows that one attention call works on, and which of them begin with the same keys."""

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
    keys from `num_tokens` on (Hydragen, arXiv 2402.05099). An implementation may ignore groups: the result is the same
    up to rounding.
    """

    first_row: int  # index into the rows
    num_rows: int  # >= 2
    num_tokens: int  # > 0, a multiple of block_size, <= kv_lens[i] - query_lens[i] of each member i


@dataclass(frozen=True, eq=False)
class AttentionRows:
    """Requests of one step that attend together. Lengths are on the host as well, so a launch waits for no device.

    Row i owns queries `cu_seqlens_q[i]:cu_seqlens_q[i+1]`; they are the last queries of its sequence, whose
    `seq_lens[i]` keys (these queries' own included) are already in the paged cache. A decode row has one query.
    """

    block_tables: torch.Tensor  # [num_rows, max_blocks], int32; entries past a row's blocks: any of the pool's
    cu_seqlens_q: torch.Tensor  # [num_rows + 1], int32, starts at 0
    seq_lens: torch.Tensor  # [num_rows], int32, tokens in KV after this step, >= number of queries of the row
    query_lens: tuple[int, ...]  # the same as cu_seqlens_q's differences, on the host
    # The same as seq_lens, on the host. On a GPU they may be upper bounds: a captured launch is sized once for all.
    kv_lens: tuple[int, ...]
    # Rows that begin with the same blocks, in rising order. A row is in one group or in none.
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
        """The first key of each row after its group's prefix; 0 for a row in no group."""
        starts = [0] * self.num_rows
        for group in self.prefix_groups:
            starts[group.first_row : group.first_row + group.num_rows] = [group.num_tokens] * group.num_rows
        return tuple(starts)

    def once(self, key: tuple[str | int, ...], make: Callable[[], Plan]) -> Plan:
        """What `make` returned to the first layer that asked for this key: computed once for all layers of the step."""
        if key not in self._plans:
            self._plans[key] = make()
        return cast("Plan", self._plans[key])

    @cached_property
    def _plans(self) -> dict[tuple[str | int, ...], object]:
        return {}
