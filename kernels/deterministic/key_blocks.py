"""Attention of tiles of queries over one block of keys, always in the same shape."""

from __future__ import annotations

import torch

from kernels.cpu.flash import flash_attention

# Keys are reduced in blocks of this many tokens, cut at multiples of it in the sequence. 64 costs a query half as much
# again per key, and 256 makes short sequences pay for keys that they do not have.
KEY_BLOCK_TOKENS = 128
# Rows of a tile: queries times the heads that share a KV head. 16 rows would save a third in prefill and cost decode,
# which has one query a tile, as much again.
TILE_ROWS = 8


def queries_per_tile(group_size: int) -> int:
    """Queries that share a tile where group_size query heads share a KV head."""
    return max(TILE_ROWS // group_size, 1)


def as_tiles(q: torch.Tensor, num_kv_heads: int, num_queries: int) -> torch.Tensor:
    """Consecutive queries in tiles of num_queries, filled up with zeros.

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
    tiles: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, mask: torch.Tensor, scale: float
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of each tile over its block of keys.

    tiles [B, Hkv, rows, D] float32; keys, values [B or 1, KEY_BLOCK_TOKENS, Hkv, D] float32;
    mask [B or 1, 1, rows or 1, KEY_BLOCK_TOKENS] float32, added to the scores.
    -> output [B, Hkv, rows, D], log-sum-exp [B, Hkv, rows], both float32.
    """
    num_tiles = tiles.shape[0]
    if num_tiles * tiles.shape[1] == 1:
        # The threads share tiles and heads; a single one would get all threads inside its products instead.
        tiles = tiles.expand(2, -1, -1, -1)
    batch = tiles.shape[0]
    output, lse = flash_attention(
        tiles,
        keys.expand(batch, -1, -1, -1).transpose(1, 2),
        values.expand(batch, -1, -1, -1).transpose(1, 2),
        scale,
        mask=mask,
    )
    return output[:num_tiles], lse[:num_tiles]
