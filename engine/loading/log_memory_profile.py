"""The line that says where a GPU's memory goes."""

from __future__ import annotations

from dataclasses import asdict

import structlog

from engine.kv_cache.kv_cache_spec import KVCacheSpec
from engine.loading.memory_profile import MemoryProfile
from settings import EngineSettings

_log = structlog.get_logger(__name__)


def log_memory_profile(profile: MemoryProfile, spec: KVCacheSpec, settings: EngineSettings) -> None:
    """One event with every part in bytes and the tokens that the pool holds.

    A warning where the pool that was set is larger than what remains for it: steps may then run out of memory.
    """
    num_blocks = settings.kv_cache.num_blocks or 0
    pool_bytes = num_blocks * spec.bytes_per_block
    fits = pool_bytes <= profile.kv_bytes
    log = _log.info if fits else _log.warning
    log(
        "memory_profile",
        **asdict(profile),
        kv_bytes=profile.kv_bytes,
        pool_bytes=pool_bytes,
        pool_blocks=num_blocks,
        pool_tokens=(num_blocks - 1) * spec.block_size,
        fits=fits,
    )
