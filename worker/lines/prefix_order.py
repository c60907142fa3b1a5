"""Ordering prompts by what they begin with."""

from __future__ import annotations

import hashlib

HEAD_BYTES = 1024  # compared byte by byte
# Beyond the head, prompts that agree up to one of these lengths are put side by side, in no particular order.
LEVELS_BYTES = (4_096, 16_384, 65_536)

PrefixKey = tuple[bytes, ...]


def shard_head(key: PrefixKey) -> str:
    """Where a shard whose first prompt has this key sorts among shards, as Redis compares texts in any locale."""
    return key[0].hex()


def prefix_sort_key(prompt_key: str) -> PrefixKey:
    """A key of bounded size whose order puts prompts with a long common beginning side by side.

    The keys of a job are all in memory at once: 50 000 prompts of 256 KiB would be 13 GB, their keys are 60 MB.
    """
    data = prompt_key.encode("utf-8", "surrogatepass")
    levels = (data[:length] if len(data) > HEAD_BYTES else b"" for length in LEVELS_BYTES)
    return (data[:HEAD_BYTES], *(hashlib.blake2b(level, digest_size=8).digest() if level else b"" for level in levels))
