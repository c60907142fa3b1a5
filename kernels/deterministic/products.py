"""Matrix products, dense and of experts, in tiles of rows whose bits agree; routing and the gated activation.

Which heights of a tile agree is found by experiment, once for each shape of a weight.
"""

from __future__ import annotations

import functools
from collections.abc import Callable

import torch

from kernels.cpu import dense, experts, quantised
from kernels.interface import KernelsUnavailable
from kernels.operands import ExpertLayout, PackedWeight, RoutedExperts
from kernels.quantised import PackedQuantised, QuantisedWeight

# The product of this many rows defines the bits. MKL (2024.2, AVX-512) takes one path below 16 rows and another from 16
# on, which is the faster by far for many rows; oneDNN's bfloat16 product is one path from 4 rows on.
TILE_ROWS = 16
# Heights that are used where they give the same bits: fewer rows for small decodes, more for prefill (float32,
# 1536 x 512, one core: 31 us a row with 16, 22 with 32, 17 with 64, 15 with 128).
OTHER_HEIGHTS = (64, 32, 8, 4)
PROBE_ROWS = 64
ALIGNMENT_BYTES = 64

# PyTorch cuts larger element-wise work between threads, at any element, and computes what is left of a cut after whole
# vectors by another exp: one row of 999 had other bits with two threads.
MAX_UNCUT_ELEMENTS = 32_767


def pack(weight: torch.Tensor | QuantisedWeight, *, keep_dtype: bool = False) -> PackedWeight:
    """See `Operations.pack`. The weight itself, in its dtype: tile heights are probed with plain weights, and nothing
    promises that products with a packed one sum in one order.
    """
    if isinstance(weight, QuantisedWeight):
        return PackedQuantised.as_loaded(weight)
    return PackedWeight.unchanged(weight)


def linear(x: torch.Tensor, weight: PackedWeight, *, gated: bool = False) -> torch.Tensor:
    """See `Operations.linear`."""
    out = quantised_product(x, weight.weight) if isinstance(weight, PackedQuantised) else product(x, weight.tensor)
    return silu_and_mul(out) if gated else out


def quantised_product(x: torch.Tensor, weight: QuantisedWeight) -> torch.Tensor:
    """x [T, K] times a quantised matrix [N, K] -> [T, N], a tile of its rows at a time, each as `product` does it."""
    dtype, x = x.dtype, quantised.prepared(x, weight)
    num_rows, step = weight.shape[0], quantised.tile_rows(weight)
    bounds = [(start, min(start + step, num_rows)) for start in range(0, num_rows, step)]
    parts = [product(x, _aligned(quantised.dequantise(weight, *tile, x.dtype))) for tile in bounds]
    return torch.cat(parts, dim=1).to(dtype)


def expert_product(x: torch.Tensor, weight: PackedWeight, expert: int) -> torch.Tensor:
    """x [T, K], weight [E, N, K] -> [T, N]."""
    if isinstance(weight, PackedQuantised):
        return quantised_product(x, weight.weight.matrices[expert])
    return product(x, weight.matrices[expert])


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
            dense.product_into(_aligned(x[start:end]), weight, out[start:end])
        else:
            tile = x.new_zeros(height, x.shape[1])
            tile[: num_rows - start] = x[start:]
            out[start:] = dense.product_into(tile, weight, x.new_empty(height, out.shape[1]))[: num_rows - start]
        start = end
    return out


def next_height(heights: tuple[int, ...], num_rows: int) -> int:
    """Height of the next tile where num_rows > 0 rows are left; a tile is padded if they fill two thirds of it.

    heights: tallest first. A tile of twice the height costs less than twice the time.
    """
    fitting = next((height for height in heights if height <= num_rows), None)
    covering = next((height for height in reversed(heights) if height >= num_rows), None)
    if fitting is None or (covering is not None and 3 * num_rows >= 2 * covering):
        return covering or heights[-1]
    return fitting


def _aligned(tile: torch.Tensor) -> torch.Tensor:
    """A copy unless aligned: MKL may choose code by alignment (its guide to reproducible results asks for 64 bytes)."""
    return tile if tile.data_ptr() % ALIGNMENT_BYTES == 0 else tile.clone()


@functools.cache
def tile_heights(
    shape: tuple[int, int], dtype: torch.dtype, misalignment_bytes: int, num_threads: int
) -> tuple[int, ...]:
    """Heights, tallest first, whose products have the bits of `TILE_ROWS` in every row, found by experiment.

    Libraries choose code by shape, alignment, type and threads, never by values, so random operands are enough. A
    height that fails is not used, which costs only speed. Allocates a weight of that shape once per process.

    shape: of the weight, [N, K]; misalignment_bytes: its address modulo 64; num_threads: PyTorch's, part of the key.
    Raises KernelsUnavailable where even `TILE_ROWS` gives a row other bits at another place in the tile.
    """
    generator = torch.Generator().manual_seed(0)
    size = shape[0] * shape[1]
    skipped = misalignment_bytes // dtype.itemsize
    weight = torch.empty(size + skipped, dtype=dtype)[skipped:].view(shape).normal_(generator=generator)
    x = torch.empty(PROBE_ROWS, shape[1], dtype=dtype).normal_(generator=generator)
    expected = _product_in_tiles(x, weight, TILE_ROWS)
    if not torch.equal(_product_in_tiles(x.roll(5, 0), weight, TILE_ROWS), expected.roll(5, 0)):
        raise KernelsUnavailable(
            "cpu",
            f"a product with a weight of {shape} in {dtype} depends on a row's place; accepted: deterministic off",
        )
    same = [height for height in OTHER_HEIGHTS if torch.equal(_product_in_tiles(x, weight, height), expected)]
    return tuple(sorted((*same, TILE_ROWS), reverse=True))


def _product_in_tiles(x: torch.Tensor, weight: torch.Tensor, height: int) -> torch.Tensor:
    out = x.new_empty(x.shape[0], weight.shape[0])
    for start in range(0, x.shape[0], height):
        dense.product_into(x[start : start + height].clone(), weight, out[start : start + height])
    return out


def silu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.silu_and_mul`. As many rows at a time as PyTorch leaves to one thread; a longer row alone, since
    it is always cut alike.
    """
    return _uncut(dense.silu_and_mul, gate_up)


def gelu_and_mul(gate_up: torch.Tensor) -> torch.Tensor:
    """See `Operations.gelu_and_mul`. As many rows at a time as `silu_and_mul`."""
    return _uncut(dense.gelu_and_mul, gate_up)


def clamped_swiglu(gate_up: torch.Tensor, alpha: float, limit: float) -> torch.Tensor:
    """See `Operations.clamped_swiglu`. A row at a time: clamped rows lie side by side, so that where vectors end would
    depend on a row's place.
    """
    out = gate_up.new_empty(gate_up.shape[0], gate_up.shape[1] // 2)
    for row in range(gate_up.shape[0]):
        out[row : row + 1] = dense.clamped_swiglu(gate_up[row : row + 1], alpha, limit)
    return out


def _uncut(activation: Callable[[torch.Tensor], torch.Tensor], gate_up: torch.Tensor) -> torch.Tensor:
    num_rows, width = gate_up.shape[0], gate_up.shape[1] // 2
    rows = max(MAX_UNCUT_ELEMENTS // width, 1)
    if num_rows <= rows:
        return activation(gate_up)
    out = gate_up.new_empty(num_rows, width)
    for start in range(0, num_rows, rows):
        out[start : start + rows] = activation(gate_up[start : start + rows])
    return out


def cap_logits(logits: torch.Tensor, cap: float) -> None:
    """See `Operations.cap_logits`. A row at a time, which is always cut alike."""
    for row in range(logits.shape[0]):
        dense.cap_logits(logits[row : row + 1], cap)


def route_topk(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> RoutedExperts:
    """See `Operations.route_topk`. The weights are added up in the order of the choices.

    PyTorch sums a few columns along rows or along columns, depending on the number of rows.
    """
    weights, expert_ids = experts.route_topk(router_logits, top_k, renormalise=False)
    if renormalise:
        total = weights[:, :1].clone()
        for choice in range(1, top_k):
            total += weights[:, choice : choice + 1]
        weights = weights / total
    return RoutedExperts(weights, expert_ids)


def grouped_gemm(
    x: torch.Tensor, weight: PackedWeight, layout: ExpertLayout, *, gather: bool, gated: bool = False
) -> torch.Tensor:
    """See `Operations.grouped_gemm`. Each expert's rows in tiles of their own."""
    products = experts.products_by_expert(x, weight, layout, expert_product, gather=gather)
    return silu_and_mul(products) if gated else products


def moe_small_batch(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    """See `Operations.moe_small_batch`. The bits are those of sorted tokens, so the choice between them is free."""
    return experts.products_by_pair(x, gate_up, down, routed, expert_product)


def route_and_sort(router_logits: torch.Tensor, top_k: int, *, renormalise: bool) -> tuple[torch.Tensor, ExpertLayout]:
    """See `Operations.route_and_sort`."""
    routed = route_topk(router_logits, top_k, renormalise=renormalise)
    return routed.weights, experts.sort_tokens_by_expert(routed.expert_ids, router_logits.shape[1])
