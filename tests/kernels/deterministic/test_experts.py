from __future__ import annotations

import pytest
import torch

from kernels import deterministic, reference
from kernels.expert_types import RoutedExperts
from kernels.packed_weight import PackedWeight
from tests.support.assert_close import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
HIDDEN, INTERMEDIATE = 72, 40
NUM_TOKENS, NUM_EXPERTS, TOP_K = 45, 6, 3


def layer_inputs(dtype: torch.dtype) -> tuple[torch.Tensor, PackedWeight, PackedWeight, RoutedExperts]:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(NUM_EXPERTS, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(NUM_EXPERTS, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    x = torch.randn(NUM_TOKENS, HIDDEN, generator=generator)
    routed = reference.route_topk(torch.randn(NUM_TOKENS, NUM_EXPERTS, generator=generator), TOP_K, renormalise=True)
    return x.to(dtype), deterministic.pack(gate_up.to(dtype)), deterministic.pack(down.to(dtype)), routed


def sorted_layer(x: torch.Tensor, gate_up: PackedWeight, down: PackedWeight, routed: RoutedExperts) -> torch.Tensor:
    layout = deterministic.sort_tokens_by_expert(routed.expert_ids, NUM_EXPERTS)
    hidden = deterministic.silu_and_mul(deterministic.grouped_gemm(x, gate_up, layout, gather=True))
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
