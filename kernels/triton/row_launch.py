"""Launch parameters of the operations that go over rows once: norms, the gated activation, rotary embedding.

They are bound by memory, so what counts is bytes in flight: an H200 moves 4.3 TB/s at about 0.8 us of latency, that is
3.4 MB in flight or 26 KB on each of its 132 multiprocessors. A tile of 2,048 to 4,096 elements is 4 to 8 KiB of each
bfloat16 operand, and at the 23 to 48 registers a thread that the compiler needs, 8 to 16 programs fit: 64 KiB and more.
The tile sizes are derived from that and from the shapes, not tuned: nothing here is measured on a GPU yet.
"""

from __future__ import annotations

from dataclasses import dataclass

import triton

# From so many programs of one row on, every multiprocessor of an H200 or A100 (132, 108) has its 16 and a second round,
# so that several short rows may share a program; below, one row each keeps more multiprocessors busy.
MANY_ROWS = 4096
NORM_TILE_ELEMENTS = 4096
GATE_TILE_ELEMENTS = 2048
# 8 elements a thread, 16 bytes of bfloat16, for the two warps a program of the rotary embedding has.
ROPE_TILE_ELEMENTS = 512
MAX_GATE_WIDTH = 1024
MIN_GATE_WIDTH = 256


@dataclass(frozen=True)
class RowLaunch:
    """The tile of one program and the warps that work on it."""

    block_rows: int  # rows (tokens, or heads of one token) of a tile, a power of two
    block_width: int  # elements of a row in a tile, a power of two
    num_warps: int


def norm_launch(num_rows: int, hidden_size: int) -> RowLaunch:
    """A tile holds whole rows, since a norm needs a row's sum before its first result.

    Warps by the row's length as in Liger-Kernel's `calculate_settings` (4 below 2,048 elements, 8 from there, 16 from
    8,192 on): a thread holds 8 to 32 elements of each operand.
    """
    width = triton.next_power_of_2(hidden_size)
    rows = max(NORM_TILE_ELEMENTS // width, 1) if num_rows >= MANY_ROWS else 1
    rows = min(rows, 16)  # narrower rows than 256 elements gain nothing from more
    num_warps = 4 if width < 2048 else 8 if width < 8192 else 16
    return RowLaunch(rows, width, num_warps)


def gate_launch(num_rows: int, intermediate_size: int) -> RowLaunch:
    """A tile is a piece of one row, or of several where rows are many.

    Its width divides the row where a power of two from 256 on does (768 = 3 x 256, 14,336 = 14 x 1,024), so that no
    lane idles; else the last piece is masked.
    """
    largest_divisor = intermediate_size & -intermediate_size
    width = min(largest_divisor, MAX_GATE_WIDTH)
    if width < MIN_GATE_WIDTH:
        width = min(triton.next_power_of_2(intermediate_size), MAX_GATE_WIDTH)
    rows = min(GATE_TILE_ELEMENTS // width, 16) if num_rows >= MANY_ROWS else 1
    num_warps = min(max(rows * width // 256, 1), 4)  # 8 elements a thread and operand, or 16 in the largest tile
    return RowLaunch(rows, width, num_warps)


def rope_launch(num_heads: int, head_dim: int) -> RowLaunch:
    """A tile is one half of some heads of one token; the other half is a second tile.

    Heads of one token share its cosines and sines, which are float32 and as large as two bfloat16 heads: read once a
    head they would double what the kernel reads.
    """
    width = triton.next_power_of_2(head_dim // 2)
    heads = min(max(ROPE_TILE_ELEMENTS // width, 1), triton.next_power_of_2(num_heads))
    return RowLaunch(heads, width, 1 if heads * width <= ROPE_TILE_ELEMENTS // 2 else 2)
