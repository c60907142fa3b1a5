"""Matrix products in tiles of rows whose bits agree."""

from __future__ import annotations

import torch

from kernels.cpu import projection as cpu
from kernels.deterministic.tile_heights import ALIGNMENT_BYTES, tile_heights
from kernels.packed_weight import PackedWeight


def pack(weight: torch.Tensor, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. The tensor itself, whose dtype is kept either way: which tiles agree was found out for
    plain weights, and a packed one's products are not promised to sum in one order.
    """
    return PackedWeight.unchanged(weight)


def linear(x: torch.Tensor, weight: PackedWeight) -> torch.Tensor:
    """See `Operations.linear`."""
    return product(x, weight.tensor)


def product(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [T, K], weight [N, K] -> [T, N]. The last tile is filled up with zeros."""
    out = x.new_empty(x.shape[0], weight.shape[0])
    misalignment = weight.data_ptr() % ALIGNMENT_BYTES
    shape = (weight.shape[0], weight.shape[1])
    heights = tile_heights(shape, weight.dtype, misalignment, torch.get_num_threads())
    x = x.contiguous()
    num_rows = x.shape[0]
    start = 0
    while start < num_rows:
        height = next_height(heights, num_rows - start)
        end = start + height
        if end <= num_rows:
            cpu.product_into(_aligned(x[start:end]), weight, out[start:end])
        else:
            tile = x.new_zeros(height, x.shape[1])
            tile[: num_rows - start] = x[start:]
            out[start:] = cpu.product_into(tile, weight, x.new_empty(height, out.shape[1]))[: num_rows - start]
        start = end
    return out


def next_height(heights: tuple[int, ...], num_rows: int) -> int:
    """The tile for the first of num_rows > 0 rows: filled up where at least two thirds of it are rows.

    heights: tallest first. A tile of twice the height costs less than twice the time.
    """
    fitting = next((height for height in heights if height <= num_rows), None)
    covering = next((height for height in reversed(heights) if height >= num_rows), None)
    if fitting is None or (covering is not None and 3 * num_rows >= 2 * covering):
        return covering or heights[-1]
    return fitting


def _aligned(tile: torch.Tensor) -> torch.Tensor:
    """MKL may choose by alignment (its guide to reproducible results asks for 64 bytes)."""
    return tile if tile.data_ptr() % ALIGNMENT_BYTES == 0 else tile.clone()
