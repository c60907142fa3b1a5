from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kernels import cpu, reference
from kernels.cpu.batched_experts import is_batched
from kernels.interface import Operations
from kernels.routed_experts import RoutedExperts
from tests.support.assert_close import assert_close

DTYPES = [torch.float32, torch.bfloat16, torch.float16]
# (tokens, experts, experts per token): one token, odd numbers, more experts than pairs (so most take none).
SHAPES = [(1, 8, 2), (13, 5, 3), (6, 128, 8), (33, 4, 4)]
HIDDEN, INTERMEDIATE = 72, 40


def logits(num_tokens: int, num_experts: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, num_experts, generator=torch.Generator().manual_seed(3)).to(dtype)


def weights(num_experts: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    gate_up = torch.randn(num_experts, 2 * INTERMEDIATE, HIDDEN, generator=generator) / HIDDEN**0.5
    down = torch.randn(num_experts, HIDDEN, INTERMEDIATE, generator=generator) / INTERMEDIATE**0.5
    return gate_up.to(dtype), down.to(dtype)


def hidden_states(num_tokens: int, dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(num_tokens, HIDDEN, generator=torch.Generator().manual_seed(5)).to(dtype)


def unsorted_layer(
    operations: Operations, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: RoutedExperts
) -> torch.Tensor:
    return operations.moe_small_batch(x, operations.pack(gate_up), operations.pack(down), routed)


def sorted_layer(
    operations: Operations, x: torch.Tensor, gate_up: torch.Tensor, down: torch.Tensor, routed: RoutedExperts
) -> torch.Tensor:
    layout = operations.sort_tokens_by_expert(routed.expert_ids, gate_up.shape[0])
    hidden = operations.silu_and_mul(operations.grouped_gemm(x, operations.pack(gate_up), layout, gather=True))
    rows = operations.grouped_gemm(hidden, operations.pack(down), layout, gather=False)
    return operations.combine_experts(rows, layout, routed.weights)


def is_batched_with(counts: list[int]) -> bool:
    ids = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    return is_batched(reference.sort_tokens_by_expert(ids[:, None], len(counts)).runs, len(counts))


def test_experts_are_batched_unless_padding_or_idle_experts_would_cost_more() -> None:
    assert is_batched_with([4] * 8)
    assert is_batched_with([8, 0, 4, 4, 4, 4, 4, 4])
    assert not is_batched_with([3] * 8)  # one by one
    assert not is_batched_with([30, 1, 1, 1])  # nearly all of it padding
    assert not is_batched_with([9, 0, 0, 9, 9, 9, 9, 9])  # two are read for nothing
    assert not is_batched_with([65] * 8)
    assert not is_batched_with([0] * 8)


@pytest.mark.parametrize("counts", [[4] * 8, [8, 4, 4, 6], [0, 9, 6, 11, 9, 9, 9, 9], [64, 64]])
def test_one_batched_product_is_the_products_one_by_one(counts: list[int]) -> None:
    assert is_batched_with(counts)
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts))
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))][:, None]
    x, (gate_up, down) = hidden_states(len(experts), torch.float32), weights(len(counts), torch.float32)
    padding = int(experts.flatten().argsort(stable=True)[0])  # what experts with fewer rows are padded with
    x[padding] = torch.nan
    routed = RoutedExperts(torch.ones(experts.shape), experts)
    actual = sorted_layer(cpu, x, gate_up, down, routed)
    others = torch.arange(len(experts)) != padding
    assert actual[padding].isnan().all()
    assert_close(actual[others], sorted_layer(reference, x, gate_up, down, routed)[others])


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_routing_agrees_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, renormalise: bool, dtype: torch.dtype
) -> None:
    router_logits = logits(num_tokens, num_experts, dtype)
    actual = cpu.route_topk(router_logits, top_k, renormalise=renormalise)
    expected = reference.route_topk(router_logits, top_k, renormalise=renormalise)
    assert_close(actual.expert_ids, expected.expert_ids)
    assert_close(actual.weights, expected.weights)


@pytest.mark.parametrize("operations", [cpu, reference])
def test_ties_go_to_the_lower_expert(operations: Operations) -> None:
    router_logits = torch.zeros(2, 16)
    router_logits[1, [5, 9, 14]] = 1.0
    ids = operations.route_topk(router_logits, 5, renormalise=True).expert_ids.tolist()
    assert ids == [[0, 1, 2, 3, 4], [5, 9, 14, 0, 1]]


@pytest.mark.parametrize("operations", [cpu, reference])
def test_a_row_with_a_nan_gets_nan_weights_and_the_first_experts(operations: Operations) -> None:
    router_logits = logits(3, 8, torch.float32)
    router_logits[1, 6] = torch.nan
    routed = operations.route_topk(router_logits, 2, renormalise=True)
    assert routed.weights[1].isnan().all()
    assert routed.expert_ids[1].tolist() == [0, 1]
    assert routed.weights[[0, 2]].isfinite().all()
    gate_up, down = weights(8, torch.float32)
    out = sorted_layer(operations, hidden_states(3, torch.float32), gate_up, down, routed)
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


@pytest.mark.parametrize("num_experts", [1, 7, 128])
def test_sorting_agrees_with_the_reference(num_experts: int) -> None:
    ids = torch.randint(num_experts, (29, 3), generator=torch.Generator().manual_seed(6))
    actual, expected = (ops.sort_tokens_by_expert(ids, num_experts) for ops in (cpu, reference))
    assert_close(actual.pair_ids, expected.pair_ids)
    assert_close(actual.expert_offsets, expected.expert_offsets)
    assert actual.top_k == expected.top_k == 3


@pytest.mark.parametrize("operations", [cpu, reference])
def test_an_expert_that_does_not_exist_is_refused(operations: Operations) -> None:
    with pytest.raises(ValueError, match="0 to 3"):
        operations.sort_tokens_by_expert(torch.tensor([[0, 4]]), 4)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_grouped_gemm_agrees_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, gather: bool, dtype: torch.dtype
) -> None:
    routed = reference.route_topk(logits(num_tokens, num_experts, dtype), top_k, renormalise=True)
    layout = reference.sort_tokens_by_expert(routed.expert_ids, num_experts)
    x = hidden_states(num_tokens if gather else num_tokens * top_k, dtype)
    gate_up, _ = weights(num_experts, dtype)
    assert_close(
        cpu.grouped_gemm(x, cpu.pack(gate_up), layout, gather=gather),
        reference.grouped_gemm(x, reference.pack(gate_up), layout, gather=gather),
    )


def test_grouped_gemm_when_one_expert_takes_every_token() -> None:
    layout = cpu.sort_tokens_by_expert(torch.full((9, 1), 2), 6)
    x, (gate_up, _) = hidden_states(9, torch.float32), weights(6, torch.float32)
    assert_close(
        cpu.grouped_gemm(x, cpu.pack(gate_up), layout, gather=True), reference.linear(x, reference.pack(gate_up[2]))
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_combining_agrees_with_the_reference(num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype) -> None:
    routed = reference.route_topk(logits(num_tokens, num_experts, dtype), top_k, renormalise=False)
    layout = reference.sort_tokens_by_expert(routed.expert_ids, num_experts)
    rows = hidden_states(num_tokens * top_k, dtype)
    assert_close(
        cpu.combine_experts(rows, layout, routed.weights), reference.combine_experts(rows, layout, routed.weights)
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_both_ways_through_the_layer_agree_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, dtype: torch.dtype
) -> None:
    routed = reference.route_topk(logits(num_tokens, num_experts, dtype), top_k, renormalise=True)
    x, (gate_up, down) = hidden_states(num_tokens, dtype), weights(num_experts, dtype)
    expected = unsorted_layer(reference, x, gate_up, down, routed)
    assert_close(unsorted_layer(cpu, x, gate_up, down, routed), expected)
    assert_close(sorted_layer(cpu, x, gate_up, down, routed), expected)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_the_layer_agrees_with_transformers(norm_topk_prob: bool) -> None:
    config = Qwen3MoeConfig(
        hidden_size=HIDDEN,
        moe_intermediate_size=INTERMEDIATE,
        num_experts=8,
        num_experts_per_tok=3,
        norm_topk_prob=norm_topk_prob,
    )
    block = Qwen3MoeSparseMoeBlock(config)
    gate_up, down = weights(8, torch.float32)
    router = torch.randn(8, HIDDEN, generator=torch.Generator().manual_seed(8))
    block.load_state_dict({"experts.gate_up_proj": gate_up, "experts.down_proj": down, "gate.weight": router})
    x = hidden_states(21, torch.float32)
    routed = cpu.route_topk(cpu.linear(x, cpu.pack(router)), 3, renormalise=norm_topk_prob)
    with torch.no_grad():
        expected = block(x[None])[0]
    assert_close(sorted_layer(cpu, x, gate_up, down, routed), expected)
    assert_close(unsorted_layer(cpu, x, gate_up, down, routed), expected)
