"""Rows of experts as a rectangle."""

from __future__ import annotations

from typing import NamedTuple

import torch


class PaddedRows(NamedTuple):
    """Each expert's rows padded to those of the expert with the most, by the layout's first row."""

    places: torch.Tensor  # [E, most rows of an expert], int64: rows of the layout
    experts: torch.Tensor  # [rows], int64: where each row of the layout lies in `places`
    columns: torch.Tensor  # [rows], int64

    @classmethod
    def of(cls, expert_offsets: torch.Tensor) -> PaddedRows:
        """expert_offsets [E + 1] int64: expert e owns the rows offsets[e] .. offsets[e+1] - 1; at least one row."""
        counts = expert_offsets.diff()[:, None]
        columns = torch.arange(int(counts.max()))
        is_row = columns < counts
        places = (expert_offsets[:-1, None] + columns).masked_fill_(~is_row, 0)
        return cls(places, *is_row.nonzero(as_tuple=True))
