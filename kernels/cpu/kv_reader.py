"""Reading the paged cache into dense buffers."""

from __future__ import annotations

import torch

# Bytes of one gather of keys (values take as much again): 2048 tokens of 8 heads of 128 in bfloat16. Of 1 to 16 MiB
# the fastest for 64 rows of 512 tokens (11 ms a layer; 20 ms with 1 MiB, above 30 with 16): keys and values still lie
# in the cache when attention reads them, and malloc keeps the pages.
GATHER_BYTES = 4 << 20


class KvReader:
    """Copies blocks of one layer's keys and values into two buffers that each read overwrites."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """k_cache, v_cache [num_blocks, block_size, Hkv, D]."""
        self._caches = (k_cache.view(k_cache.shape[0], -1), v_cache.view(v_cache.shape[0], -1))
        self._buffers = (k_cache.new_empty(0), v_cache.new_empty(0))
        self.num_blocks: int = k_cache.shape[0]
        self.block_size: int = k_cache.shape[1]
        self.num_kv_heads: int = k_cache.shape[2]
        self.head_dim: int = k_cache.shape[3]
        self._token_bytes = self.num_kv_heads * self.head_dim * k_cache.element_size()
        self.max_tokens: int = self.tokens_of(GATHER_BYTES)

    def tokens_of(self, num_bytes: int) -> int:
        """Tokens, whole blocks and at least one, whose keys take at most so many bytes."""
        return max(num_bytes // self._token_bytes // self.block_size, 1) * self.block_size

    @property
    def vectors(self) -> tuple[torch.Tensor, torch.Tensor]:
        """Both caches themselves, [num_blocks * block_size * Hkv, D]."""
        keys, values = self._caches
        return keys.view(-1, self.head_dim), values.view(-1, self.head_dim)

    def read_tokens(self, block_table: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens start .. end - 1 of a row, each [1, Hkv, end - start, D]; not to be written.

        block_table [max_blocks] int64. Views of the caches where the row's blocks follow one another there.
        """
        first_block = start // self.block_size
        block_ids = block_table[first_block : -(-end // self.block_size)]
        first_id, num_blocks = int(block_ids[0]), block_ids.shape[0]
        if torch.equal(block_ids, torch.arange(first_id, first_id + num_blocks)):
            shape = (num_blocks * self.block_size, self.num_kv_heads, self.head_dim)
            keys, values = (cache[first_id : first_id + num_blocks].view(shape) for cache in self._caches)
        else:
            keys, values = self.read(block_ids)
        offset = start - first_block * self.block_size
        tokens = slice(offset, offset + end - start)
        return keys[tokens].transpose(0, 1)[None], values[tokens].transpose(0, 1)[None]

    def read(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of the blocks, in order: two [num_tokens, Hkv, D] views of the buffers.

        block_ids [n] int64. The views are valid until the next read, and may be written.
        """
        num_blocks = block_ids.shape[0]
        if self._buffers[0].shape[0] < num_blocks:
            k, v = self._caches
            self._buffers = (k.new_empty(num_blocks, k.shape[1]), v.new_empty(num_blocks, v.shape[1]))
        keys, values = (
            torch.index_select(cache, 0, block_ids, out=buffer[:num_blocks]).view(-1, self.num_kv_heads, self.head_dim)
            for cache, buffer in zip(self._caches, self._buffers, strict=True)
        )
        return keys, values
