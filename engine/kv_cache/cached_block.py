"""What a registered block holds."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class CachedBlock:
    """The identity of a full, immutable block. Tokens and parent are kept to verify a hit."""

    block_id: int
    digest: bytes
    parent: bytes
    token_ids: tuple[int, ...]  # exactly block_size of them
