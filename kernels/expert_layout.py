"""Which rows of a mixture-of-experts layer each expert works on."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import pairwise

import torch


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The (token, choice) pairs of a layer ordered by expert.

    Pair p stands for token `p // top_k` and its choice `p % top_k`.
    """

    pair_ids: torch.Tensor  # [num_tokens * top_k], int64: pairs ordered by expert, stable within one expert
    expert_offsets: torch.Tensor  # [num_experts + 1], int64: expert e owns pair_ids[offsets[e]:offsets[e+1]]
    top_k: int

    def runs(self) -> Iterator[tuple[int, slice]]:
        """Each expert that has rows, and which rows of the order are its own. Waits for the device."""
        for expert, (start, end) in enumerate(pairwise(self.expert_offsets.tolist())):
            if start < end:
                yield expert, slice(start, end)
