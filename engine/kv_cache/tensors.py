"""Allocates the memory of the KV cache, and says what a block of it takes."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch

from kernels.operands import in_huge_pages


@dataclass(frozen=True, slots=True)
class KVCacheSpec:
    """Shape and size of the KV cache."""

    num_layers: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype  # of keys and values: the model's, or float8_e4m3fn

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
    keys: tuple[torch.Tensor, ...]  # a layer each: [num_blocks, block_size, num_kv_heads, head_dim], spec.dtype
    values: tuple[torch.Tensor, ...]  # likewise

    @classmethod
    def allocate(cls, spec: KVCacheSpec, num_blocks: int, device: torch.device) -> KVCacheTensors:
        """Zeroed pools of `num_blocks` blocks, the null block included: num_blocks * spec.bytes_per_block bytes.

        On a CPU a page takes memory only once it is written. Raises what the device's allocator raises where memory
        runs out, see `engine.out_of_memory`.
        """
        shape = (num_blocks, spec.block_size, spec.num_kv_heads, spec.head_dim)
        count = 2 * spec.num_layers
        if device.type == "cpu":
            # One mapping for all layers, since a huge page needs 2 MiB of one: of a mapping for each, heads and tails
            # are left with small pages (a quarter of 27 tensors of 9.4 MiB). torch.zeros would write all at once.
            memory = in_huge_pages(count * math.prod(shape) * spec.dtype.itemsize)
            tensors = memory.view(spec.dtype).view(count, *shape).unbind()
        else:
            tensors = tuple(torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(count))
        return cls(spec, tensors[: spec.num_layers], tensors[spec.num_layers :])

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return int(self.keys[0].shape[0])
