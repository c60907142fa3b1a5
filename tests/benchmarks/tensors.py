"""Random inputs."""

from __future__ import annotations

import torch

DTYPE = torch.bfloat16


def random(*shape: int, device: torch.device, dtype: torch.dtype = DTYPE) -> torch.Tensor:
    """Normally distributed, made where it is used: a head's weight on a CPU would take seconds."""
    return torch.randn(*shape, device=device, dtype=dtype)


def shuffled(size: int, device: torch.device) -> torch.Tensor:
    """0 .. size - 1 in random order, int64."""
    return torch.randperm(size, device=device)
