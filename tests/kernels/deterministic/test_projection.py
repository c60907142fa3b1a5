from __future__ import annotations

import pytest
import torch

from kernels import deterministic, reference
from kernels.deterministic.dense import next_height
from tests.support.assert_close import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (outputs, inputs): a router, odd numbers, a vocabulary wider than a row is long, a narrow and deep one.
SHAPES = [(8, 64), (37, 129), (640, 96), (72, 1408)]


def random(*shape: int, dtype: torch.dtype, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def linear(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    return deterministic.linear(x, deterministic.pack(weight))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 5, 16, 33, 150])
def test_linear_agrees_with_the_reference(num_rows: int, shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(num_rows, shape[1], dtype=dtype, seed=0), random(*shape, dtype=dtype, seed=1)
    assert_close(linear(x, weight), reference.linear(x, reference.pack(weight)))


@pytest.mark.usefixtures("num_threads")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
def test_a_row_has_the_same_bits_in_every_batch(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x, weight = random(70, shape[1], dtype=dtype, seed=0), random(*shape, dtype=dtype, seed=1)
    alone = torch.cat([linear(row[None], weight) for row in x])  # a row alone, at the top of its tile
    order = torch.randperm(70, generator=torch.Generator().manual_seed(2))
    for size in (2, 23, 70):
        batches = [linear(x[rows], weight) for rows in torch.split(order, size)]
        assert torch.equal(torch.cat(batches), alone[order])


@pytest.mark.parametrize("dtype", DTYPES)
def test_neither_the_place_of_the_input_nor_of_the_weight_matters(dtype: torch.dtype) -> None:
    x, weight = random(40, 33, dtype=dtype, seed=0), random(3, 50, 33, dtype=dtype, seed=1)
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
