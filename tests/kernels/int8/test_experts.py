from __future__ import annotations

import pytest
import torch

from kernels import int8, reference
from kernels.expert_types import RoutedExperts
from tests.support.assert_close import assert_close
from tests.support.int8_products import int8_linear
from tests.support.needs_vnni import needs_vnni

DTYPES = [torch.float32, torch.bfloat16]
HIDDEN, INTERMEDIATE = 72, 40
NUM_TOKENS, NUM_EXPERTS, TOP_K = 29, 6, 3

pytestmark = needs_vnni


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
    hidden = int8.silu_and_mul(int8.grouped_gemm(x, int8.pack(gate_up), layout, gather=True))
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
