"""One sequence's next token, for the model interface."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeItem:
    """Run one token of a prepared or prefilled sequence."""

    cache_id: str
    token_id: int
    position: int  # = tokens of this sequence in KV
