"""A sequence held through the model interface."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv_cache.block_hash_chain import BlockHashChain


@dataclass(slots=True)
class CacheEntry:
    """A sequence held through the model interface. Written by ModelRunner alone."""

    chain: BlockHashChain
    token_ids: list[int] = field(default_factory=list)  # known; all in KV between calls
    is_open: bool = False  # holds blocks
