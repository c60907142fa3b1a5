"""Deterministic products and experts: a row has the same bits in every batch."""

from __future__ import annotations

import pytest
import torch

from kernels import deterministic, reference
from kernels.cpu.dense import product_into
from kernels.deterministic.products import TILE_ROWS, next_height, tile_heights
from kernels.interface import KernelsUnavailable
from kernels.operands import PackedWeight, RoutedExperts
from tests.support.tensors import assert_close, randn

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (outputs, inputs): a router, odd numbers, a vocabulary wider than a row is long, a narrow and deep one.
SHAPES = [(8, 64), (37, 129), (640, 96), (72, 1408)]

PRODUCT = "kernels.cpu.dense.product_into"

HIDDEN, INTERMEDIATE = 72, 40
NUM_TOKENS, NUM_EXPERTS, TOP_K = 45, 6, 3


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return deterministic.linear(x, deterministic.pack(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 33, 150])
def test_linear_agrees_with_the_reference(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(num_rows, shape[1], dtype=dtype, seed=0), randn(*shape, dtype=dtype, seed=1)
    assert_close(linear(x, weight), reference.linear(x, reference.pack(weight)))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = randn(70, shape[1], dtype=dtype, seed=0), randn(*shape, dtype=dtype, seed=1)
    alone = torch.cat([linear(row[None], weight) for row in x])  # a row alone, at the top of its tile
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    for size in (2, 23, 70):
        batches = [linear(x[rows], weight) for rows in torch.split(order, size)]
        assert torch.equal(torch.cat(batches), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_the_place_of_the_input_nor_of_the_weight_matters(dtype: torch.dtype) -> None:
    x, weight = randn(40, 33, dtype=dtype, seed=0), randn(3, 50, 33, dtype=dtype, seed=1)
    wide = torch.cat([x, x], dim=1)
    for expert in range(3):  # an expert's weight begins at an odd address
        expected = linear(x, weight[expert])
        assert torch.equal(linear(wide[:, :33], weight[expert]), expected)
        for start in (1, 2, 3):
            assert torch.equal(linear(x[start:], weight[expert]), expected[start:])


def test_the_rest_of_a_batch_takes_few_and_well_filled_tiles() -> None:
    def tiles(heights: tuple[int, ...], num_rows: int) -> list[int]:
        taken = []
        while num_rows > 0:
            taken.append(next_height(heights, num_rows))
            num_rows -= taken[-1]
        return taken

    assert tiles((64, 32, 16), 1) == [16]
    assert tiles((64, 32, 16), 130) == [64, 64, 16]
    assert tiles((64, 32, 16), 20) == [16, 16]
    assert tiles((64, 32, 16), 45) == [64]
    assert tiles((64, 32, 16, 8, 4), 3) == [4]
    assert tiles((16,), 40) == [16, 16, 16]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_heights_found_give_the_bits_of_the_tile(dtype: torch.dtype) -> None:
    heights = tile_heights((96, 200), dtype, 0, torch.get_num_threads())
    assert TILE_ROWS in heights
    assert list(heights) == sorted(heights, reverse=True)
    generator = torch.Generator().manual_seed(7)
    x, weight = (torch.randn(rows, 200, generator=generator).to(dtype) for rows in (64, 96))

    def product(height: int) -> torch.Tensor:
        parts = [product_into(tile.clone(), weight, x.new_empty(height, 96)) for tile in torch.split(x, height)]
        return torch.cat(parts)

    for height in heights:
        assert torch.equal(product(height), product(TILE_ROWS))


def test_a_height_that_sums_in_another_order_is_left_out(monkeypatch: pytest.MonkeyPatch) -> None:
    def other_order_below_16_rows(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        product_into(x, weight, out)  # by one unit in the last place, which another order may or may not change
        return out if x.shape[0] >= 16 else out.copy_(out.nextafter(torch.full_like(out, torch.inf)))

    monkeypatch.setattr(PRODUCT, other_order_below_16_rows)
    assert not {4, 8} & set(tile_heights.__wrapped__((96, 200), torch.float32, 0, 1))


def test_a_product_that_depends_on_the_place_in_the_tile_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    def last_row_rounded_twice(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        product_into(x, weight, out)
        out[-1] = out[-1].bfloat16()
        return out

    monkeypatch.setattr(PRODUCT, last_row_rounded_twice)
    with pytest.raises(KernelsUnavailable, match=r"\(96, 200\).*depends on a row's place"):
        tile_heights.__wrapped__((96, 200), torch.float32, 0, 1)


def test_a_weight_off_the_alignment_is_probed_off_it(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = set()

    def recording(x: torch.Tensor, weight: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        seen.add(weight.data_ptr() % 64)
        return product_into(x, weight, out)

    monkeypatch.setattr(PRODUCT, recording)
    tile_heights.__wrapped__((5, 7), torch.bfloat16, 34, 1)
    assert seen == {34}


def layer_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, PackedWeight, PackedWeight, RoutedExperts]:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    routed = reference.route_topk(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator), TOP_K, renormalise=True)
    return x.to(dtype), deterministic.pack(gate_up.to(dtype)), deterministic.pack(down.to(dtype)), routed


def sorted_layer(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    layout = deterministic.sort_tokens_by_expert(routed.expert_ids, NUM_EXPERTS)
    hidden = deterministic.grouped_gemm(x, gate_up, layout, gather=True, gated=True)
    rows = deterministic.grouped_gemm(hidden, down, layout, gather=False)
    return deterministic.combine_experts(rows, layout, routed.weights)


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_through_the_layer_agree_with_the_reference(dtype: torch.dtype) -> None:
    inputs = layer_inputs(dtype)
    expected = reference.moe_small_batch(*inputs)
    assert_close(sorted_layer(*inputs), expected)
    assert_close(deterministic.moe_small_batch(*inputs), expected)


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_token_has_the_same_bits_both_ways_and_in_every_batch(dtype: torch.dtype) -> None:
    x, gate_up, down, routed = layer_inputs(dtype)
    together = sorted_layer(x, gate_up, down, routed)
    for size in (1, 4, 19):
        for way in (sorted_layer, deterministic.moe_small_batch):
            parts = [
                way(x[rows], gate_up, down, RoutedExperts(routed.weights[rows], routed.expert_ids[rows]))
                for rows in torch.split(torch.arange(NUM_TOKENS), size)
            ]
            assert torch.equal(torch.cat(parts), together)
