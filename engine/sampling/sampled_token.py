"""One chosen token."""

from __future__ import annotations

from dataclasses import dataclass

from engine.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SampledToken:
    """One chosen token, with its log-probabilities where the request asked for them."""

    token_id: int
    logprobs: TokenLogprobs | None
