"""Penalties on tokens that have occurred."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    prompt_counts: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `Operations.apply_penalties`. Only rows with a penalty and only tokens that occurred are touched."""
    active = (repetition != 1) | (presence != 0) | (frequency != 0)
    for row in active.nonzero().flatten().tolist():
        tokens = (prompt_counts[row] | output_counts[row]).nonzero().flatten()
        counts = output_counts[row].index_select(0, tokens).float()
        values = logits[row].index_select(0, tokens)
        values = torch.where(values < 0, values * repetition[row], values / repetition[row])
        values -= counts * frequency[row]
        values -= (counts > 0) * presence[row]
        logits[row].index_copy_(0, tokens, values)
