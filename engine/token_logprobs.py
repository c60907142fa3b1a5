"""Log-probabilities at one generated position."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural log-probabilities under the model's raw logits: before penalties, bias, temperature and truncation."""

    token_id: int
    logprob: float
    top: tuple[tuple[int, float], ...]  # (token id, logprob), best first, as many as the request asked for
