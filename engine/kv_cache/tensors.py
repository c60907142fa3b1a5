"""Allocates the memory of the KV cache, and says what a block of it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np
import torch


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and size of the KV cache."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def bytes_per_token(self) -> int:
        """2 (keys and values) * layers * KV heads * head_dim * itemsize."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def bytes_per_block(self) -> int:
        """Over all layers."""
        return self.bytes_per_token * self.block_size


@dataclass(frozen=True, eq=False)
class KVCacheTensors:
    """The memory of the KV cache, made at start and kept as long as the model."""

    spec: KVCacheSpec
    keys: tuple[torch.Tensor, ...]  # a layer each: [num_blocks, block_size, num_kv_heads, head_dim], model dtype
    values: tuple[torch.Tensor, ...]  # likewise

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVCacheTensors:
        """Zeroed pools of `num_blocks` blocks, the null block included: num_blocks * spec.bytes_per_block bytes.

        On a CPU a page takes memory only once it is written. Raises what the device's allocator raises where memory
        runs out, see `engine.out_of_memory`.
        """
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        keys = tuple(_zeros(shape, spec.dtype, device) for _ in range(spec.num_layers))
        values = tuple(_zeros(shape, spec.dtype, device) for _ in range(spec.num_layers))
        return cls(spec, keys, values)

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return int(self.keys[0].shape[0])


def _zeros(shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    if device.type != "cpu":
        return torch.zeros(shape, dtype=dtype, device=device)
    # torch.zeros writes every page: 2.3 s and 1 GB of memory a GB here. NumPy's come untouched from the kernel, in huge
    # pages where it may, which halves the time of the first write.
    return torch.from_numpy(np.zeros(math.prod(shape) * dtype.itemsize, dtype=np.uint8)).view(dtype).view(shape)
