"""Allocates the memory of the KV cache, and says what a block of it takes."""

from __future__ import annotations

import math
import mmap
from contextlib import suppress
from dataclasses import dataclass

import torch

HUGE_PAGE_BYTES = 2 << 20  # of Linux on x86-64; and on arm64 with pages of 4 KiB


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
        count = 2 * spec.num_layers
        if device.type == "cpu":
            memory = _untouched_memory(count * math.prod(shape) * spec.dtype.itemsize)
            tensors = memory.view(spec.dtype).view(count, *shape).unbind()
        else:
            tensors = tuple(torch.zeros(shape, dtype=spec.dtype, device=device) for _ in range(count))
        return cls(spec, tensors[: spec.num_layers], tensors[spec.num_layers :])

    @property
    def num_blocks(self) -> int:
        """Blocks in the pool, the null block included."""
        return int(self.keys[0].shape[0])


def _untouched_memory(num_bytes: int) -> torch.Tensor:
    """Zeros, [num_bytes] uint8, whose pages take memory when they are first written; huge pages where the system has
    them. Raises MemoryError.

    One mapping for all layers, since a huge page needs 2 MiB of one: of a mapping for each, heads and tails are left
    with small pages (a quarter of 27 tensors of 9.4 MiB). torch.zeros would write every page at once.
    """
    if num_bytes == 0:
        return torch.empty(0, dtype=torch.uint8)
    mapped_bytes = -(-num_bytes // HUGE_PAGE_BYTES) * HUGE_PAGE_BYTES + HUGE_PAGE_BYTES
    try:
        mapping = mmap.mmap(-1, mapped_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    except OSError as error:
        raise MemoryError(f"{mapped_bytes} bytes: {error}") from error
    with suppress(AttributeError, OSError):  # no Linux, or one without huge pages: small ones serve, more slowly
        mapping.madvise(mmap.MADV_HUGEPAGE)
    memory = torch.frombuffer(mapping, dtype=torch.uint8)  # keeps the mapping
    start = -memory.data_ptr() % HUGE_PAGE_BYTES
    return memory[start : start + num_bytes]
