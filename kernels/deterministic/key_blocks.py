"""Blocks of keys: lists those that the rows attend to, reads them, and attends tiles of queries to one.

They are cut at multiples of `KEY_BLOCK_TOKENS` in the sequence, whatever the cache's blocks, and added in rising order.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from kernels.cpu.partial_attention import cap, flash_attention
from kernels.operands import ScoreRule

# Tokens of a block. With 64 a query takes half as long again per key, and 256 make short sequences pay for keys that
# they do not have.
KEY_BLOCK_TOKENS = 128
# Rows of a tile: queries times the heads that share a KV head. 16 rows would save a third in prefill and double decode,
# which has one query a tile.
TILE_ROWS = 8


def queries_per_tile(group_size: int) -> int:
    """Queries that share a tile where group_size query heads share a KV head."""
    return max(TILE_ROWS // group_size, 1)


def as_tiles(q: torch.Tensor, num_kv_heads: int, num_queries: int) -> torch.Tensor:
    """Consecutive queries in tiles of num_queries, padded with zeros.

    q [Q, Hq, D] -> [ceil(Q / num_queries), Hkv, rows, D] float32, rows a multiple of `TILE_ROWS`: query after query,
    each with the heads of one KV head.
    """
    total, num_heads, head_dim = q.shape
    num_tiles = -(-total // num_queries)
    group_size = num_heads // num_kv_heads
    rows = -(-num_queries * group_size // TILE_ROWS) * TILE_ROWS
    padded = q.new_zeros(num_tiles * num_queries, num_heads, head_dim, dtype=torch.float32)
    padded[:total] = q
    tiles = padded.new_zeros(num_tiles, num_kv_heads, rows, head_dim)
    by_head = padded.view(num_tiles, num_queries, num_kv_heads, group_size, head_dim).transpose(1, 2)
    used = tiles[:, :, : num_queries * group_size]
    used.copy_(by_head.reshape(used.shape))
    return tiles


def from_tiles(tiles: torch.Tensor, num_queries: int, group_size: int, total: int) -> torch.Tensor:
    """The reverse for a result [num_tiles, Hkv, rows, ...] -> [total, Hq, ...]."""
    num_tiles, num_kv_heads, _, *rest = tiles.shape
    used = tiles[:, :, : num_queries * group_size].reshape(num_tiles, num_kv_heads, num_queries, group_size, *rest)
    return used.transpose(1, 2).flatten(0, 1).flatten(1, 2)[:total]


def attend_key_block(
    tiles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, rule: ScoreRule
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each tile over its block of keys.

    tiles [B, Hkv, rows, D] float32; keys, values [B or 1, KEY_BLOCK_TOKENS, Hkv, D] float32;
    mask [B or 1, 1, rows or 1, KEY_BLOCK_TOKENS] float32, added to the scores.
    -> output [B, Hkv, rows, D], log-sum-exp [B, Hkv, rows], both float32.
    """
    if (
        rule.soft_cap is not None
    ):  # in the place of the mask: no operator caps, but this one adds and takes exp in order
        mask = _capped_scores(tiles, keys, rule).add_(mask)
        tiles, rule = torch.zeros_like(tiles), ScoreRule(1.0)
    num_tiles = tiles.shape[0]
    if num_tiles * tiles.shape[1] == 1:
        # Threads share out tiles and heads, but with only one of them all work inside its products.
        tiles, mask = tiles.expand(2, -1, -1, -1), mask.expand(2, -1, -1, -1)
    batch = tiles.shape[0]
    output, lse = flash_attention(
        tiles,
        keys.expand(batch, -1, -1, -1).transpose(1, 2),
        values.expand(batch, -1, -1, -1).transpose(1, 2),
        rule,
        mask=mask,
    )
    return output[:num_tiles], lse[:num_tiles]


def _capped_scores(tiles: torch.Tensor, keys: torch.Tensor, rule: ScoreRule) -> torch.Tensor:
    """[B, Hkv, rows, KEY_BLOCK_TOKENS] float32. One product of one shape for each tile and KV head, and tanh of as much
    as no thread shares: the bits of both depend on where a row stands in more.
    """
    keys = keys.transpose(1, 2).contiguous()
    scores = tiles.new_empty((*tiles.shape[:3], KEY_BLOCK_TOKENS))
    for tile in range(tiles.shape[0]):
        for head in range(tiles.shape[1]):
            own = keys[tile if keys.shape[0] > 1 else 0, head]
            torch.mm(tiles[tile, head], own.t(), out=scores[tile, head])
            cap(scores[tile, head].mul_(rule.scale), rule.soft_cap)
    return scores


@dataclass(frozen=True, eq=False)
class KeyBlockPlan:
    """Pairs of a row and one of its blocks of keys; the same for every layer.

    Blocks are counted from the first that is seen. All first ones come before all second ones, and so on, each in the
    order of `row_ids`: the rows with most blocks first, so that the first `rows_with_block[j]` rows have a j-th block.
    """

    row_ids: torch.Tensor  # [num_rows], int64: rows that have keys, by falling number of blocks
    rows_with_block: tuple[int, ...]  # for each block number, how many rows have it
    places: torch.Tensor  # [num_pairs], int64: each pair's row, as its place in row_ids
    slots: torch.Tensor  # [num_pairs, KEY_BLOCK_TOKENS], int64: outside a row's keys the row's last token
    mask: torch.Tensor  # [num_pairs, 1, 1, KEY_BLOCK_TOKENS], float32: -inf outside a row's keys, else 0

    @classmethod
    def build(
        cls, block_tables: torch.Tensor, first_keys: Sequence[int], kv_lens: Sequence[int], block_size: int
    ) -> KeyBlockPlan:
        """block_tables [num_rows, max_blocks] int32; the keys of each row from the first that is seen to the end of
        kv_lens; block_size of the cache in tokens.
        """
        skipped = [first // KEY_BLOCK_TOKENS for first in first_keys]
        num_blocks = [-(-end // KEY_BLOCK_TOKENS) - before for before, end in zip(skipped, kv_lens, strict=True)]
        order = sorted((row for row, count in enumerate(num_blocks) if count), key=lambda row: -num_blocks[row])
        longest = num_blocks[order[0]] if order else 0
        rows_with_block = tuple(sum(num_blocks[row] > block for row in order) for block in range(longest))
        places = [place for count in rows_with_block for place in range(count)]
        starts = [
            (skipped[row] + block) * KEY_BLOCK_TOKENS
            for block, count in enumerate(rows_with_block)
            for row in order[:count]
        ]
        row_ids = torch.tensor(order, dtype=torch.int64)
        place_ids = torch.tensor(places, dtype=torch.int64)
        positions = torch.tensor(starts, dtype=torch.int64)[:, None] + torch.arange(KEY_BLOCK_TOKENS)
        pair_rows = row_ids.index_select(0, place_ids)
        firsts, ends = (
            torch.tensor(numbers, dtype=torch.int64).index_select(0, pair_rows)[:, None]
            for numbers in (first_keys, kv_lens)
        )
        is_outside = (positions >= ends) | (positions < firsts)
        # A key outside is masked, but must be finite: 0 * NaN is NaN. The row's last is as finite as the row.
        positions = positions.where(~is_outside, ends - 1)
        blocks = block_tables.long().index_select(0, pair_rows).gather(1, positions // block_size)
        slots = blocks.mul_(block_size).add_(positions % block_size)
        mask = torch.zeros(is_outside.shape).masked_fill_(is_outside, -torch.inf)
        return cls(row_ids, rows_with_block, place_ids, slots, mask[:, None, None, :])


class KeyBlockReader:
    """Copies one layer's keys and values in float32, token by token: blocks of keys are not blocks of the cache."""

    def __init__(self, k_cache: torch.Tensor, v_cache: torch.Tensor) -> None:
        """k_cache, v_cache [num_blocks, block_size, Hkv, D]."""
        self._caches = (k_cache.view(-1, *k_cache.shape[2:]), v_cache.view(-1, *v_cache.shape[2:]))
        self.block_size: int = k_cache.shape[1]
        self.num_kv_heads: int = k_cache.shape[2]
        self.head_dim: int = k_cache.shape[3]

    def read(self, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Keys and values at slots [n, m] int64 (block id * block size + offset), each [n, m, Hkv, D] float32."""
        keys, values = (cache.index_select(0, slots.flatten()).float() for cache in self._caches)
        shape = (*slots.shape, self.num_kv_heads, self.head_dim)
        return keys.view(shape), values.view(shape)


class RunningAttention:
    """Accumulates attention over blocks of keys in float32, in the order in which they are added.

    Not by `torch.logaddexp`, whose bits depend on where in its tensor a number lies (vector or remainder).
    """

    def __init__(self, shape: Sequence[int]) -> None:
        """shape: (num_queries, Hq, D)."""
        self._output = torch.zeros(shape)
        self._mass = torch.zeros(shape[:2])
        self._largest = torch.full(shape[:2], -torch.inf)

    def add(self, queries: slice, output: torch.Tensor, lse: torch.Tensor) -> None:
        """output [n, Hq, D] and lse [n, Hq] of some queries over their next block, which holds a key for each."""
        before = self._largest[queries]
        after = torch.maximum(before, lse)
        old_share = (before - after).exp_()
        new_share = (lse - after).exp_()
        self._output[queries] *= old_share[..., None]
        self._output[queries] += output * new_share[..., None]
        self._mass[queries] *= old_share
        self._mass[queries] += new_share
        self._largest[queries] = after

    def output(self, dtype: torch.dtype, sinks: torch.Tensor | None) -> torch.Tensor:
        """Attention over the blocks so far and the sinks, [Hq] float32; 0 for queries without keys."""
        mass = self._mass.masked_fill(self._largest == -torch.inf, 1.0)
        if sinks is not None:
            mass = mass + (sinks - self._largest).exp_()
        return (self._output / mass[..., None]).to(dtype)
