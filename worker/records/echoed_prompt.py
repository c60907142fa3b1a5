"""A prompt that comes back with its completions."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from worker.records.chosen_token import ChosenToken


@dataclass(frozen=True, slots=True)
class EchoedPrompt:
    """A prompt's text and, where log-probabilities were asked for, its tokens: all three as long as each other."""

    text: str
    token_ids: Sequence[int] = ()
    offsets: Sequence[int] = ()  # where each token begins in the text, in characters
    entries: Sequence[ChosenToken | None] = ()  # None: the first token, which nothing predicts
