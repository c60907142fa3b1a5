"""Paged caches with known contents and everything around them poisoned."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch

from kernels.attention_types import AttentionRows, PrefixGroup


@dataclass(frozen=True)
class PagedCache:
    """Caches in which every slot that belongs to no token is NaN, the rows that use them, and their queries."""

    q: torch.Tensor  # [sum of query_lens, Hq, D]
    k_cache: torch.Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor
    rows: AttentionRows

    def without_groups(self) -> PagedCache:
        """The same rows over the same blocks, their shared beginnings not pointed out."""
        return replace(self, rows=replace(self.rows, prefix_groups=()))


def make_paged_cache(
    lens: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
    prefix_groups: Sequence[tuple[int, int, int]] = (),
) -> PagedCache:
    """lens: (query_len, kv_len) of each row. Blocks are handed out in random order; the null block holds NaN.

    prefix_groups: (first_row, num_rows, num_tokens); members of one begin with the blocks of its first row.
    """
    groups = tuple(PrefixGroup(*group) for group in prefix_groups)
    check_prefix_groups(groups, lens, block_size)
    generator = torch.Generator().manual_seed(seed)
    num_used = [-(-kv_len // block_size) for _, kv_len in lens]
    num_blocks = sum(num_used) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    block_tables = torch.zeros(len(lens), max(num_used, default=0) + 1, dtype=torch.int32)
    for row, (_, kv_len) in enumerate(lens):
        shared = _share_blocks(block_tables, groups, row, block_size)
        for index in range(shared, num_used[row]):
            block = free.pop()
            block_tables[row, index] = block
            filled = min(block_size, kv_len - index * block_size)
            for cache in (k_cache, v_cache):
                cache[block, :filled] = torch.randn(filled, num_kv_heads, head_dim, generator=generator)
    query_lens = tuple(query_len for query_len, _ in lens)
    q = torch.randn(sum(query_lens), num_heads, head_dim, generator=generator)
    return PagedCache(
        q=q.to(dtype),
        k_cache=k_cache.to(dtype),
        v_cache=v_cache.to(dtype),
        rows=AttentionRows(
            block_tables=block_tables,
            cu_seqlens_q=torch.tensor([0, *query_lens]).cumsum(0).int(),
            seq_lens=torch.tensor([kv_len for _, kv_len in lens], dtype=torch.int32),
            query_lens=query_lens,
            kv_lens=tuple(kv_len for _, kv_len in lens),
            prefix_groups=groups,
        ),
    )


def check_prefix_groups(groups: Sequence[PrefixGroup], lens: Sequence[tuple[int, int]], block_size: int) -> None:
    """Hold groups to what `PrefixGroup` and `AttentionRows.prefix_groups` promise; lens as in `make_paged_cache`."""
    end = 0
    for group in groups:
        assert group.first_row >= end, f"{group} begins before row {end}"
        end = group.first_row + group.num_rows
        assert group.num_rows >= 2
        assert end <= len(lens), f"{group} ends after row {len(lens)}"
        assert group.num_tokens > 0
        assert group.num_tokens % block_size == 0
        for query_len, kv_len in lens[group.first_row : end]:
            assert group.num_tokens <= kv_len - query_len, f"{group} is longer than what lies before a member's queries"


def _share_blocks(block_tables: torch.Tensor, groups: Sequence[PrefixGroup], row: int, block_size: int) -> int:
    """Write the shared blocks of a row that follows others of its group. -> how many there are."""
    for group in groups:
        if group.first_row < row < group.first_row + group.num_rows:
            num_blocks = group.num_tokens // block_size
            block_tables[row, :num_blocks] = block_tables[group.first_row, :num_blocks]
            return num_blocks
    return 0
