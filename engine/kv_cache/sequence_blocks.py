"""The blocks of one sequence."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.kv_cache.block_hash_chain import BlockHashChain


@dataclass(slots=True)
class SequenceBlocks:
    """The blocks one sequence holds. Written by BlockManager alone."""

    chain: BlockHashChain
    num_committed_blocks: int = 0  # leading blocks known to hold good KV; registered where their digest was new
    block_table: list[int] = field(default_factory=list)
