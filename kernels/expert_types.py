"""What a router chose, and which rows of a mixture-of-experts layer each expert works on."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch


class RoutedExperts(NamedTuple):
    """The experts of each token and their weights."""

    weights: torch.Tensor  # [num_tokens, top_k], float32
    expert_ids: torch.Tensor  # [num_tokens, top_k], int64; ties go to the lower id


class ExpertRun(NamedTuple):
    """One expert's rows, which lie side by side in an `ExpertLayout`."""

    expert: int
    num_rows: int  # at least 1


@dataclass(frozen=True, eq=False)
class ExpertLayout:
    """The (token, choice) pairs of a layer ordered by expert.

    Pair p stands for token `p // top_k` and its choice `p % top_k`.
    """

    pair_ids: torch.Tensor  # [num_tokens * top_k], int64: pairs ordered by expert, stable within one expert
    expert_offsets: torch.Tensor  # [num_experts + 1], int64: expert e owns pair_ids[offsets[e]:offsets[e+1]]
    top_k: int

    @cached_property
    def runs(self) -> tuple[ExpertRun, ...]:
        """The experts that have rows, in order. Waits for the device."""
        counts = enumerate(self.expert_offsets.diff().tolist())
        return tuple(ExpertRun(expert, num_rows) for expert, num_rows in counts if num_rows)

    @cached_property
    def run_lens(self) -> list[int]:
        """Number of rows of each run."""
        return [run.num_rows for run in self.runs]
