"""What happens to logits before a token is drawn, and the greedy choice."""

from __future__ import annotations

import torch


def argmax(logits: torch.Tensor) -> torch.Tensor:
    """See `Operations.argmax`. A NaN counts as the largest value."""
    winners = []
    for row in logits.tolist():
        best = 0
        for token, value in enumerate(row):
            # `x != x` is how a NaN shows; the first NaN ends the search.
            if row[best] == row[best] and (value > row[best] or value != value):  # noqa: PLR0124
                best = token
        winners.append(best)
    return torch.tensor(winners, dtype=torch.int64)


def apply_penalties(
    logits: torch.Tensor,
    rows: torch.Tensor,
    token_ids: torch.Tensor,
    output_counts: torch.Tensor,
    repetition: torch.Tensor,
    presence: torch.Tensor,
    frequency: torch.Tensor,
) -> None:
    """See `Operations.apply_penalties`. One token at a time."""
    for row, token, count in zip(rows.tolist(), token_ids.tolist(), output_counts.tolist(), strict=True):
        value = logits[row, token].clone()
        value = value * repetition[row] if value < 0 else value / repetition[row]
        value = value - frequency[row] * count
        logits[row, token] = value - presence[row] if count > 0 else value


def mask_top_k_top_p_min_p(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> None:
    """See `Operations.mask_top_k_top_p_min_p`. One row at a time."""
    for row, k, p, least in zip(logits, top_k.tolist(), top_p.tolist(), min_p.tolist(), strict=True):
        if k < row.shape[0]:
            kth_largest = row.sort(descending=True).values[k - 1]
            row[row < kth_largest] = -torch.inf
        if p < 1:
            # Upwards, of equal values the higher token first, so that the lower one stays.
            ids = torch.tensor(sorted(range(row.shape[0]), key=lambda token: (float(row[token]), -token)))
            mass = row[ids].softmax(0).cumsum(0)
            dropped = ids[mass <= 1 - p]
            row[dropped[dropped != ids[-1]]] = -torch.inf
        if least > 0:
            probabilities = row.softmax(0)
            row[probabilities < least * probabilities.max()] = -torch.inf
