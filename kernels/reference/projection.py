"""Matrix products with a weight."""

from __future__ import annotations

import torch


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """`x @ weight.T`."""
    return (x.float() @ weight.float().T).to(x.dtype)
