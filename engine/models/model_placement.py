"""Where and how a model runs."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.interface import Operations


@dataclass(frozen=True, eq=False)
class ModelPlacement:
    """Where and how a model runs: everything about it that is not in the checkpoint."""

    device: torch.device
    dtype: torch.dtype
    ops: Operations
    max_positions: int  # rows of the rotary table: the longest sequence, in tokens
    bucketed_min_tokens: int | None  # see MoeMLP
