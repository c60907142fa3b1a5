from __future__ import annotations

import pytest
import torch

from kernels import int8, reference
from kernels.int8.products import SLAB_ELEMENTS, quantise_rows
from tests.support.assert_close import assert_close
from tests.support.int8_products import int8_linear, rounded
from tests.support.needs_vnni import needs_vnni

DTYPES = [torch.float32, torch.bfloat16]
# (outputs, inputs): one by one, odd numbers, a narrow and deep one, a vocabulary, sums beyond 2^24.
SHAPES = [(1, 1), (33, 80), (7, 3000), (1000, 65), (48, 20_001)]

pytestmark = needs_vnni


def random(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 16, 70])
def test_linear_is_plain_integer_arithmetic_bit_for_bit(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = random(num_rows, shape[1], dtype=dtype), random(*shape, dtype=dtype, seed=1)
    assert torch.equal(int8.linear(x, int8.pack(weight)), int8_linear(x, weight))


def test_the_largest_sums_do_not_saturate() -> None:
    x, weight = torch.ones(3, 4099), torch.ones(37, 4099)
    x[1] = -1
    expected = torch.tensor([4099.0, -4099.0, 4099.0])[:, None].expand(3, 37)
    assert_close(int8.linear(x, int8.pack(weight)), expected, max_steps=4)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x, weight = random(70, 333), int8.pack(random(129, 333, seed=1))
    together = int8.linear(x, weight)
    for size in (1, 3, 16, 64):
        assert torch.equal(torch.cat([int8.linear(rows, weight) for rows in torch.split(x, size)]), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_near_the_product_that_is_not_quantised(dtype: torch.dtype) -> None:
    x, weight = random(40, 512, dtype=dtype), random(96, 512, dtype=dtype, seed=1)
    exact = reference.linear(x, reference.pack(weight)).float()
    error = int8.linear(x, int8.pack(weight)).float() - exact
    assert error.square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()


def test_a_weight_that_must_keep_its_dtype_is_not_quantised() -> None:
    x, weight = random(9, 64), random(8, 64, seed=1)
    packed = int8.pack(weight, keep_dtype=True)
    assert_close(int8.linear(x, packed), reference.linear(x, reference.pack(weight)))


def test_a_quantised_weight_takes_a_quarter_of_float32() -> None:
    weight = random(256, 1024)
    assert int8.pack(weight).nbytes == 256 * 1024 + 256 * 8


def test_a_row_that_is_not_finite_shows_in_its_results_alone() -> None:
    x, weight = random(3, 64), int8.pack(random(8, 64, seed=1))
    expected = int8.linear(x, weight)
    for value in (torch.nan, torch.inf):
        x[1, 5] = value
        out = int8.linear(x, weight)
        assert not out[1].isfinite().any()
        assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_rows_and_channels_of_zeros_give_zeros() -> None:
    x, weight = random(3, 64), random(8, 64, seed=1)
    x[1], weight[2] = 0, 0
    out = int8.linear(x, int8.pack(weight))
    assert not out[1].any()
    assert not out[:, 2].any()
    assert out[0, 0] != 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_slab_by_slab(dtype: torch.dtype) -> None:
    width = SLAB_ELEMENTS // 3
    x = random(8, width, dtype=dtype)
    rows = quantise_rows(x)
    integers, scales = rounded(x)
    assert torch.equal(rows.values.long() - 128, integers)
    assert torch.equal(rows.scales, scales)
