"""Reading the keys, or the values, of one layer out of the paged cache."""

from __future__ import annotations

import torch

from kernels.cpu.block_run import BlockRun


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
