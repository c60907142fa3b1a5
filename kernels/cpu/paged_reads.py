"""Reads keys and values of one layer out of the paged cache: a copy, or a view where blocks lie side by side."""

from __future__ import annotations

from typing import NamedTuple, Self

import torch

# Bytes of one gather of keys, and of one of values: 2048 tokens of 8 heads of 128 in bfloat16. Of 1 to 16 MiB the
# fastest for 64 rows of 512 tokens (11 ms a layer; 20 with 1 MiB, above 30 with 16): keys and values still lie in the
# CPU's cache when attention reads them, and malloc keeps the pages.
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


class CacheReader:
    """Copies blocks into a buffer that each copy overwrites."""

    def __init__(self, cache: torch.Tensor) -> None:
        """cache [num_blocks, block_size, Hkv, D]."""
        self._blocks = cache.view(cache.shape[0], -1)
        self._buffer = cache.new_empty(0)
        self._heads = (cache.shape[2], cache.shape[3])

    @property
    def vectors(self) -> torch.Tensor:
        """The cache itself, [num_blocks * block_size * Hkv, D]."""
        return self._blocks.view(-1, self._heads[1])

    def read(self, block_ids: torch.Tensor) -> torch.Tensor:
        """The blocks in order, [num_tokens, Hkv, D]: valid until the next copy, and may be written.

        block_ids [n] int64.
        """
        num_blocks = block_ids.shape[0]
        if self._buffer.shape[0] < num_blocks:
            self._buffer = self._blocks.new_empty(num_blocks, self._blocks.shape[1])
        return torch.index_select(self._blocks, 0, block_ids, out=self._buffer[:num_blocks]).view(-1, *self._heads)

    def read_run(self, run: BlockRun) -> torch.Tensor:
        """The same as [Hkv, num_tokens, D], not to be written: a view where the blocks lie side by side already."""
        if run.first_id is None:
            return self.read(run.block_ids).transpose(0, 1)
        blocks = self._blocks[run.first_id : run.first_id + run.block_ids.shape[0]]
        return blocks.view(-1, *self._heads).transpose(0, 1)


class BlockRun(NamedTuple):
    """Blocks of one sequence, in order, and whether they must be copied to lie side by side: asked once, when made."""

    block_ids: torch.Tensor  # [n], int64, at least one
    first_id: int | None  # of blocks that follow one another in the cache too; None where they do not

    @classmethod
    def of(cls, block_ids: torch.Tensor) -> Self:
        """block_ids [n] int64, at least one."""
        first = int(block_ids[0])
        follows = torch.equal(block_ids, torch.arange(first, first + block_ids.shape[0]))
        return cls(block_ids, first if follows else None)
