"""A paged cache, the rows that use it, and the same keys and values contiguous for libraries."""

from __future__ import annotations

from itertools import accumulate

import torch

from kernels.attention_types import AttentionRows, PrefixGroup
from tests.benchmarks.model_shape import ModelShape
from tests.benchmarks.tensors import random, shuffled

BLOCK_SIZE = 16


class AttentionInputs:
    """Blocks of all rows are handed out in random order, as after hours of use.

    Of each group_rows rows the first shared_tokens keys are the same blocks, when group_rows is above 1.
    """

    def __init__(
        self,
        model: ModelShape,
        query_lens: tuple[int, ...],
        kv_lens: tuple[int, ...],
        device: torch.device,
        group_rows: int = 1,
        shared_tokens: int = 0,
    ) -> None:
        num_used = [-(-kv_len // BLOCK_SIZE) for kv_len in kv_lens]
        self.q = random(sum(query_lens), model.num_heads, model.head_dim, device=device)
        shape = (sum(num_used) + 1, BLOCK_SIZE, model.num_kv_heads, model.head_dim)
        self.k, self.v = (random(*shape, device=device) for _ in range(2))
        self.scale = model.head_dim**-0.5
        blocks = torch.split(shuffled(sum(num_used), device) + 1, num_used)
        tables = torch.zeros(len(kv_lens), max(num_used), dtype=torch.int32, device=device)
        for row, row_blocks in enumerate(blocks):
            tables[row, : num_used[row]] = row_blocks
        first_rows = range(0, len(kv_lens), group_rows)
        for row in first_rows:  # the blocks that the others had in their place are left unused
            tables[row : row + group_rows, : shared_tokens // BLOCK_SIZE] = tables[row, : shared_tokens // BLOCK_SIZE]
        self.rows = AttentionRows(
            block_tables=tables,
            cu_seqlens_q=_starts(query_lens, device),
            seq_lens=torch.tensor(kv_lens, dtype=torch.int32, device=device),
            query_lens=query_lens,
            kv_lens=kv_lens,
            prefix_groups=tuple(PrefixGroup(row, group_rows, shared_tokens) for row in first_rows if shared_tokens),
        )
        self.cu_seqlens_k = _starts(kv_lens, device)
        slots = torch.cat(
            [
                (table[:, None] * BLOCK_SIZE + torch.arange(BLOCK_SIZE, device=device)).flatten()[:kv_len]
                for table, kv_len in zip(tables, kv_lens, strict=True)
            ]
        )
        # [sum of kv_lens, Hkv, D] each
        self.contiguous = (self.k.flatten(0, 1)[slots], self.v.flatten(0, 1)[slots])


def _starts(lens: tuple[int, ...], device: torch.device) -> torch.Tensor:
    return torch.tensor([0, *accumulate(lens)], dtype=torch.int32, device=device)
