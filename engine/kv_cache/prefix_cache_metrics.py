"""Counters of the prefix cache."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PrefixCacheMetrics:
    """Counters since the pool was made; they survive idleness and the end of every sequence."""

    enabled: bool
    probes: int  # admissions; a preempted sequence counts again
    hits: int  # of those, how many found at least one block
    queried_tokens: int
    saved_prefill_tokens: int  # tokens whose KV was found
    evictions: int  # registered blocks that had to make room
    registered_blocks: int  # blocks a hit could find now, held or free
    used_blocks: int  # blocks held by sequences now
    free_blocks: int
    block_size: int
    registered_bytes: int
