"""Reading single tokens of the paged cache."""

from __future__ import annotations

import torch


class KeyBlockReader:
    """Copies one layer's keys and values in float32, token by token: blocks of keys need not be blocks of the cache."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """k_cache, v_cache [num_blocks, block_size, Hkv, D]."""
        self._caches = (k_cache.view(-1, *k_cache.shape[2:]), v_cache.view(-1, *v_cache.shape[2:]))
        self.block_size: int = k_cache.shape[1]
        self.num_kv_heads: int = k_cache.shape[2]
        self.head_dim: int = k_cache.shape[3]

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at slots [n, m] int64 (block id * block size + offset), each [n, m, Hkv, D] float32."""
        keys, values = (cache.index_select(0, slots.flatten()).float() for cache in self._caches)
        shape = (*slots.shape, self.num_kv_heads, self.head_dim)
        return keys.view(shape), values.view(shape)
