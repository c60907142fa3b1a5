"""Penalties on tokens that have occurred."""

from __future__ import annotations

import torch


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `Operations.apply_penalties`. Touches nothing but the tokens that occurred."""
    values = logits[rows, token_ids]
    divisor = repetition.index_select(0, rows)
    values = torch.where(values < 0, values * divisor, values / divisor)
    values -= frequency.index_select(0, rows) * output_counts
    values -= presence.index_select(0, rows) * (output_counts > 0)
    logits.index_put_((rows, token_ids), values)
