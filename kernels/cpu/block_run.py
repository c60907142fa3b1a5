"""Blocks of the paged cache that are read together."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch


class BlockRun(NamedTuple):
    """Blocks of one sequence, in order, and whether they must be copied to lie side by side: asked once, when made."""

    block_ids: torch.Tensor  # [n], int64, at least one
    first_id: int | None  # of blocks that follow one another in the cache too; None where they do not

    @classmethod
    def of(cls, block_ids: torch.Tensor) -> Self:
        """block_ids [n] int64, at least one."""
        first = int(block_ids[0])
        follows = torch.equal(block_ids, torch.arange(first, first + block_ids.shape[0]))
        return cls(block_ids, first if follows else None)
