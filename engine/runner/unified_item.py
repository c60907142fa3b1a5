"""One sequence's share of a mixed forward pass, for the model interface."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class UnifiedItem:
    """Run some tokens of a sequence, new (position 0) or known."""

    cache_id: str
    token_ids: Sequence[int]
    position: int  # of the first token: = tokens of this sequence known so far
    is_final: bool  # its last token's result is wanted
