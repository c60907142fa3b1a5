"""What the sampler must know of one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling_params import SamplingParams


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know of one row of logits."""

    params: SamplingParams
    prompt_token_ids: Sequence[int]
    output_token_ids: Sequence[int]
    seed: int
    banned_token_ids: Sequence[int] = ()  # may not be drawn at this position (min_tokens)

    @property
    def position(self) -> int:
        """Position of the token to be drawn: with the seed it decides the draw."""
        return len(self.prompt_token_ids) + len(self.output_token_ids)

    @property
    def edits_logits(self) -> bool:
        """Whether anything changes the logits before the choice."""
        return bool(self.params.logit_bias) or self.params.has_penalties or bool(self.banned_token_ids)
