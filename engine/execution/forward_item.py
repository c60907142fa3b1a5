"""One sequence's share of a forward pass."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ForwardItem:
    """Tokens to run for one sequence, and where its KV lies."""

    token_ids: Sequence[int]  # not empty; one that only the device knows yet as `pending_token` writes it
    start: int  # position of token_ids[0]; everything before it is in KV
    block_table: Sequence[int]  # covers start + len(token_ids) tokens
    wants_logits: bool  # of its last token
    wants_hidden: bool = False  # the final-norm hidden states of all its tokens
    is_final: bool = True  # its last token is the sequence's last so far: no chunk with more to come
