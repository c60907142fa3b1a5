"""Paged caches with known contents and everything around them poisoned."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from kernels.attention_rows import AttentionRows


@dataclass(frozen=True)
class PagedCache:
    """Caches in which every slot that belongs to no token is NaN, the rows that use them, and their queries."""

    q: torch.Tensor  # [sum of query_lens, Hq, D]
    k_cache: torch.Tensor  # [num_blocks, block_size, Hkv, D]
    v_cache: torch.Tensor
    rows: AttentionRows


def make_paged_cache(
    lens: list[tuple[int, int]],
    *,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    block_size: int = 16,
    seed: int = 0,
) -> PagedCache:
    """lens: (query_len, kv_len) of each row. Blocks are handed out in random order; the null block holds NaN."""
    generator = torch.Generator().manual_seed(seed)
    num_used = [-(-kv_len // block_size) for _, kv_len in lens]
    num_blocks = sum(num_used) + 3
    free = (torch.randperm(num_blocks - 1, generator=generator) + 1).tolist()
    shape = (num_blocks, block_size, num_kv_heads, head_dim)
    k_cache, v_cache = torch.full(shape, torch.nan), torch.full(shape, torch.nan)
    block_tables = torch.zeros(len(lens), max(num_used, default=0) + 1, dtype=torch.int32)
    for row, (_, kv_len) in enumerate(lens):
        for index in range(num_used[row]):
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
        ),
    )
