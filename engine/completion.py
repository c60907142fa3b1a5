"""One generated sequence of a request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.finish_reason import FinishReason
from engine.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class Completion:
    """One of a request's `n` generated sequences, finished."""

    index: int  # 0 .. n - 1
    text: str  # ends before a stop string
    token_ids: tuple[int, ...]  # everything generated, the end-of-sequence or stop token included
    finish_reason: FinishReason
    stop_reason: str | int | None  # the stop string or stop token id that ended it; None for end of sequence
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token of token_ids; None unless asked for
