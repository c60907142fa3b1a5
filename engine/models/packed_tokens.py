"""Whole sequences for an encoder, end to end."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Self

import torch


@dataclass(frozen=True, eq=False)
class PackedTokens:
    """T tokens of some sequences, end to end, without padding."""

    token_ids: torch.Tensor  # [T], int64
    positions: torch.Tensor  # [T], int64
    lengths: tuple[int, ...]  # tokens of each sequence, T in all
    # Sequences of one length are attended together: for each length the tokens of its sequences, [n, length] int64.
    rows_by_length: tuple[torch.Tensor, ...]

    @classmethod
    def of(cls, sequences: Sequence[Sequence[int]], device: torch.device) -> Self:
        """Pack sequences of token ids, none of them empty."""
        lengths = tuple(map(len, sequences))
        starts: dict[int, list[int]] = {}
        start = 0
        for length in lengths:
            starts.setdefault(length, []).append(start)
            start += length
        rows = tuple(
            (torch.tensor(firsts)[:, None] + torch.arange(length)).to(device) for length, firsts in starts.items()
        )
        return cls(
            token_ids=torch.tensor(list(chain.from_iterable(sequences)), dtype=torch.int64, device=device),
            positions=torch.cat([torch.arange(length) for length in lengths]).to(device),
            lengths=lengths,
            rows_by_length=rows,
        )
