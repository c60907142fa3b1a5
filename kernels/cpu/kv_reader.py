"""Reading the keys and values of the paged cache."""

from __future__ import annotations

import torch

from kernels.cpu.block_run import BlockRun
from kernels.cpu.cache_reader import CacheReader

# Bytes of one gather of keys (values take as much again): 2048 tokens of 8 heads of 128 in bfloat16. Of 1 to 16 MiB
# the fastest for 64 rows of 512 tokens (11 ms a layer; 20 ms with 1 MiB, above 30 with 16): keys and values still lie
# in the cache when attention reads them, and malloc keeps the pages.
GATHER_BYTES = 4 << 20


class KvReader:
    """Keys and values of one layer."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """k_cache, v_cache [num_blocks, block_size, Hkv, D]."""
        self.keys = CacheReader(k_cache)
        self.values = CacheReader(v_cache)
        self.num_blocks: int = k_cache.shape[0]
        self.block_size: int = k_cache.shape[1]
        self.num_kv_heads: int = k_cache.shape[2]
        self.head_dim: int = k_cache.shape[3]
        self._token_bytes = self.num_kv_heads * self.head_dim * k_cache.element_size()
        self.max_tokens: int = self.tokens_of(GATHER_BYTES)

    def tokens_of(self, num_bytes: int) -> int:
        """Tokens, whole blocks and at least one, whose keys take at most so many bytes."""
        return max(num_bytes // self._token_bytes // self.block_size, 1) * self.block_size

    def read(self, block_ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """`CacheReader.read` of both."""
        return self.keys.read(block_ids), self.values.read(block_ids)

    def read_tokens(self, block_table: torch.Tensor, start: int, end: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values of tokens start .. end - 1 of a row, each [1, Hkv, end - start, D]; not to be written.

        block_table [max_blocks] int64.
        """
        first_block = start // self.block_size
        run = BlockRun.of(block_table[first_block : -(-end // self.block_size)])
        offset = start - first_block * self.block_size
        tokens = slice(offset, offset + end - start)
        return self.keys.read_run(run)[None, :, tokens], self.values.read_run(run)[None, :, tokens]
