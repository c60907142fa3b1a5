"""Products and experts in 8 bits are plain integer arithmetic, bit for bit."""

from __future__ import annotations

import pytest
import torch

from kernels import int8, reference
from kernels.cpu.int8 import SLAB_ELEMENTS, quantise_rows
from kernels.operands import RoutedExperts
from tests.support.tensors import assert_close, int8_linear, needs_vnni, randn, rounded

DTYPES = [torch.float32, torch.bfloat16]
# (outputs, inputs): one by one, odd numbers, a narrow and deep one, a vocabulary, sums beyond 2^24.
SHAPES = [(1, 1), (33, 80), (7, 3000), (1000, 65), (48, 20_001)]

pytestmark = needs_vnni

HIDDEN, INTERMEDIATE = 72, 40
NUM_TOKENS, NUM_EXPERTS, TOP_K = 29, 6, 3


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("num_rows", [0, 1, 2, 5, 16, 70])
def test_linear_is_plain_integer_arithmetic_bit_for_bit(
    num_rows: int, shape: tuple[int, int], dtype: torch.dtype
) -> None:
    x, weight = randn(num_rows, shape[1], dtype=dtype), randn(*shape, dtype=dtype, seed=1)
    assert torch.equal(int8.linear(x, int8.pack(weight)), int8_linear(x, weight))


def test_the_largest_sums_do_not_saturate() -> None:
    x, weight = torch.ones(3, 4099), torch.ones(37, 4099)
    x[1] = -1
    expected = torch.tensor([4099.0, -4099.0, 4099.0])[:, None].expand(3, 37)
    assert_close(int8.linear(x, int8.pack(weight)), expected, max_steps=4)


def test_a_row_has_the_same_bits_in_every_batch() -> None:
    x, weight = randn(70, 333), int8.pack(randn(129, 333, seed=1))
    together = int8.linear(x, weight)
    for size in (1, 3, 16, 64):
        assert torch.equal(torch.cat([int8.linear(rows, weight) for rows in torch.split(x, size)]), together)


@pytest.mark.parametrize("dtype", DTYPES)
def test_linear_is_near_the_product_that_is_not_quantised(dtype: torch.dtype) -> None:
    x, weight = randn(40, 512, dtype=dtype), randn(96, 512, dtype=dtype, seed=1)
    exact = reference.linear(x, reference.pack(weight)).float()
    error = int8.linear(x, int8.pack(weight)).float() - exact
    assert error.square().mean().sqrt() < 0.02 * exact.square().mean().sqrt()


def test_a_weight_that_must_keep_its_dtype_is_not_quantised() -> None:
    x, weight = randn(9, 64), randn(8, 64, seed=1)
    packed = int8.pack(weight, keep_dtype=True)
    assert_close(int8.linear(x, packed), reference.linear(x, reference.pack(weight)))


def test_a_quantised_weight_takes_a_quarter_of_float32() -> None:
    weight = randn(256, 1024)
    assert int8.pack(weight).nbytes == 256 * 1024 + 256 * 8


def test_a_row_that_is_not_finite_shows_in_its_results_alone() -> None:
    x, weight = randn(3, 64), int8.pack(randn(8, 64, seed=1))
    expected = int8.linear(x, weight)
    for value in (torch.nan, torch.inf):
        x[1, 5] = value
        out = int8.linear(x, weight)
        assert not out[1].isfinite().any()
        assert torch.equal(out[[0, 2]], expected[[0, 2]])


def test_rows_and_channels_of_zeros_give_zeros() -> None:
    x, weight = randn(3, 64), randn(8, 64, seed=1)
    x[1], weight[2] = 0, 0
    out = int8.linear(x, int8.pack(weight))
    assert not out[1].any()
    assert not out[:, 2].any()
    assert out[0, 0] != 0


@pytest.mark.parametrize("dtype", DTYPES)
def test_rows_are_rounded_slab_by_slab(dtype: torch.dtype) -> None:
    width = SLAB_ELEMENTS // 3
    x = randn(8, width, dtype=dtype)
    rows = quantise_rows(x)
    integers, scales = rounded(x)
    assert torch.equal(rows.values.long() - 128, integers)
    assert torch.equal(rows.scales, scales)


def layer_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, RoutedExperts]:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    routed = reference.route_topk(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator), TOP_K, renormalise=True)
    return x.to(dtype), gate_up.to(dtype), down.to(dtype), routed


def expected_layer(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: RoutedExperts) -> torch.Tensor:
    out = torch.zeros(x.shape)
    for token in range(x.shape[0]):
        for weight, expert in zip(routed.weights[token], routed.expert_ids[token].tolist(), strict=True):
            hidden = int8.silu_and_mul(int8_linear(x[token : token + 1], gate_up[expert]))
            out[token] += weight * int8_linear(hidden, down[expert])[0].float()
    return out.to(x.dtype)


def sorted_layer(x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: RoutedExperts) -> torch.Tensor:
    layout = int8.sort_tokens_by_expert(routed.expert_ids, NUM_EXPERTS)
    hidden = int8.grouped_gemm(x, int8.pack(gate_up), layout, gather=True, gated=True)
    return int8.combine_experts(
        int8.grouped_gemm(hidden, int8.pack(down), layout, gather=False), layout, routed.weights
    )


@pytest.mark.parametrize("dtype", DTYPES)
def test_both_ways_through_the_layer_are_plain_integer_arithmetic(dtype: torch.dtype) -> None:
    x, gate_up, down, routed = layer_inputs(dtype)
    expected = expected_layer(x, gate_up, down, routed)
    # Beside the integers only silu and the last sum are left, whose bits depend on the batch: a step of an activation.
    tolerance = {"max_steps": 2.0**16, "rms_steps": 2.0**12} if dtype is torch.float32 else {}
    assert_close(sorted_layer(x, gate_up, down, routed), expected, **tolerance)
    assert_close(int8.moe_small_batch(x, int8.pack(gate_up), int8.pack(down), routed), expected, **tolerance)


@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_each_experts_rows_are_plain_integer_arithmetic_bit_for_bit(dtype: torch.dtype, gather: bool) -> None:
    x, gate_up, _, routed = layer_inputs(dtype)
    layout = int8.sort_tokens_by_expert(routed.expert_ids, NUM_EXPERTS)
    tokens = layout.pair_ids // TOP_K
    experts = routed.expert_ids.flatten()[layout.pair_ids]
    expected = torch.cat([int8_linear(x[t : t + 1], gate_up[e]) for t, e in zip(tokens, experts, strict=True)])
    rows = x if gather else x[tokens]
    assert torch.equal(int8.grouped_gemm(rows, int8.pack(gate_up), layout, gather=gather), expected)


def test_no_tokens_are_no_work() -> None:
    x, gate_up, down, _ = layer_inputs(torch.float32)
    none = RoutedExperts(torch.empty(0, TOP_K), torch.empty(0, TOP_K, dtype=torch.int64))
    assert sorted_layer(x[:0], gate_up, down, none).shape == (0, HIDDEN)
    assert int8.moe_small_batch(x[:0], int8.pack(gate_up), int8.pack(down), none).shape == (0, HIDDEN)
