"""How many rows a matrix product may take at once without changing a row's bits."""

from __future__ import annotations

import functools

import torch

from kernels.cpu.projection import product_into
from kernels.errors import KernelsUnavailable

# The product of this many rows defines the bits. MKL (2024.2, AVX-512) takes one path below 16 rows and another from 16
# on, which is the faster by far for many rows; oneDNN's bfloat16 product is one path from 4 rows on.
TILE_ROWS = 16
# Also tried, by the same bits: fewer rows for small decodes, more for prefill (float32, 1536 x 512, one core:
# 31 us a row with 16, 22 with 32, 17 with 64, 15 with 128).
OTHER_HEIGHTS = (64, 32, 8, 4)
PROBE_ROWS = 64
ALIGNMENT_BYTES = 64


@functools.cache
def tile_heights(
    shape: tuple[int, int], dtype: torch.dtype, misalignment_bytes: int, num_threads: int
) -> tuple[int, ...]:
    """Heights, tallest first, whose products have the bits of `TILE_ROWS` in every row, found by experiment.

    Code paths are chosen by shape, alignment, type and threads, never by values, so random operands decide. A height
    that fails costs speed alone: whichever heights a process may use, the bits are those of `TILE_ROWS`. Allocates a
    weight of that shape once per process.

    shape: of the weight, [N, K]; misalignment_bytes: its address modulo 64; num_threads: PyTorch's, part of the key.
    Raises KernelsUnavailable where even `TILE_ROWS` gives a row other bits at another place in the tile.
    """
    generator = torch.Generator().manual_seed(0)
    size = shape[0] * shape[1]
    skipped = misalignment_bytes // dtype.itemsize
    weight = torch.empty(size + skipped, dtype=dtype)[skipped:].view(shape).normal_(generator=generator)
    x = torch.empty(PROBE_ROWS, shape[1], dtype=dtype).normal_(generator=generator)
    expected = _product(x, weight, TILE_ROWS)
    if not torch.equal(_product(x.roll(5, 0), weight, TILE_ROWS), expected.roll(5, 0)):
        raise KernelsUnavailable(
            "cpu",
            f"a product with a weight of {shape} in {dtype} depends on a row's place; accepted: deterministic off",
        )
    same = [height for height in OTHER_HEIGHTS if torch.equal(_product(x, weight, height), expected)]
    return tuple(sorted((*same, TILE_ROWS), reverse=True))


def _product(x: torch.Tensor, weight: torch.Tensor, height: int) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[0], height):
        product_into(x[start : start + height].clone(), weight, out[start : start + height])
    return out
