"""One batch of key ranges that are read from the paged cache together."""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True, eq=False)
class KvGather:
    """Ranges of keys of single-query rows, padded to one length so that one attention call takes them all."""

    query_ids: torch.Tensor  # [num_ranges], int64: the query (row of q) each range belongs to, no two the same
    block_ids: torch.Tensor  # [num_ranges * num_blocks], int64: blocks of the ranges, padded with the null block
    num_tokens: int  # keys per range, padding included: num_blocks * block_size
    padding_ids: torch.Tensor  # [num_padding], int64: which of the num_ranges * num_tokens keys lie past a range's end
    mask: torch.Tensor | None  # [num_ranges, 1, 1, num_tokens], float32: -inf at padding, else 0; None: no padding

    @property
    def num_ranges(self) -> int:
        """Number of key ranges."""
        return self.query_ids.shape[0]
