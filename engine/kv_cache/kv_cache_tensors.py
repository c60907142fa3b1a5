"""The memory of the KV cache."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from engine.kv_cache.kv_cache_spec import KVCacheSpec


@dataclass(frozen=True, eq=False)
class KVCacheTensors:
    """The memory of the KV cache, made at start, kept as long as the model: no release destroys it (seeds A13)."""

    spec: KVCacheSpec
    keys: tuple[torch.Tensor, ...]  # a layer each: [num_blocks, block_size, num_kv_heads, head_dim], model dtype
    values: tuple[torch.Tensor, ...]  # likewise

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVCacheTensors:
        """Zeroed pools. On a CPU zeroed pages cost memory only once they are written."""
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        keys = tuple(torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(spec.num_layers))
        values = tuple(torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(spec.num_layers))
        return cls(spec, keys, values)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return int(self.keys[0].shape[0])
