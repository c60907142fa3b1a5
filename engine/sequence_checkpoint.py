"""How far one sequence had come."""

from __future__ import annotations

from dataclasses import dataclass

from engine.token_logprobs import TokenLogprobs


@dataclass(frozen=True, slots=True)
class SequenceCheckpoint:
    """What one of a request's `n` sequences had generated. Whether it had ended follows from its tokens."""

    token_ids: tuple[int, ...]
    logprobs: tuple[TokenLogprobs, ...] | None  # one a token; None unless the request asked for them
