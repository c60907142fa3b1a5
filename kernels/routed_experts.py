"""What a router chose."""

from __future__ import annotations

from typing import NamedTuple

import torch


class RoutedExperts(NamedTuple):
    """The experts of each token and their weights."""

    weights: torch.Tensor  # [num_tokens, top_k], float32
    expert_ids: torch.Tensor  # [num_tokens, top_k], int64; ties go to the lower id
