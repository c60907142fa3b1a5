"""The most likely token."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `Operations.argmax`. PyTorch returns the first of several maxima, and a NaN counts as the largest."""
    return logits.argmax(-1)
