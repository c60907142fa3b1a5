"""What the sampler must know of one row of logits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from engine.sampling.token_counts import TokenCounts
from engine.sampling_params import SamplingParams
from engine.structured.grammar_matcher import GrammarMatcher


@dataclass(frozen=True, slots=True)
class SamplingRow:
    """What the sampler must know of one row of logits."""

    params: SamplingParams
    position: int  # of the token to be drawn: with the seed it decides the draw
    seed: int
    counts: TokenCounts | None = None  # wanted where the parameters have penalties
    banned_token_ids: Sequence[int] = ()  # may not be drawn at this position (min_tokens)
    matcher: GrammarMatcher | None = None  # where the sequence stands in its grammar
