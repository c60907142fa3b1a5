"""The layer of experts on a CPU agrees with the reference and with transformers."""

from __future__ import annotations

import pytest
import torch
from transformers import Qwen3MoeConfig
from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeSparseMoeBlock

from kernels import cpu, reference
from kernels.interface import Operations
from kernels.operands import ExpertLayout, RoutedExperts
from tests.support.tensors import assert_close

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
    hidden = operations.grouped_gemm(x, operations.pack(gate_up), layout, gather=True, gated=True)
    rows = operations.grouped_gemm(hidden, operations.pack(down), layout, gather=False)
    return operations.combine_experts(rows, layout, routed.weights)


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


def layout_of(counts: list[int]) -> ExpertLayout:
    """So many tokens, with one choice each, for each expert, in random order."""
    experts = torch.arange(len(counts)).repeat_interleave(torch.tensor(counts, dtype=torch.int64))
    experts = experts[torch.randperm(len(experts), generator=torch.Generator().manual_seed(1))]
    return reference.sort_tokens_by_expert(experts[:, None], len(counts))


# Numbers of rows on both sides of each bound between products from the left and from the right.
@pytest.mark.parametrize("small_elements", [1 << 20, 1], ids=["small matrices", "large matrices"])
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize("counts", [[1, 7, 0, 8, 12], [13, 0, 56, 57], [0, 0, 0], [0, 30]])
def test_any_number_of_rows_agrees_with_the_reference(
    counts: list[int], gather: bool, small_elements: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("kernels.cpu.experts.SMALL_ELEMENTS", small_elements)
    layout, (gate_up, _) = layout_of(counts), weights(len(counts), torch.float32)
    x = hidden_states(sum(counts), torch.float32)
    if counts[-1]:
        x[layout.pair_ids[-1] if gather else -1] = torch.nan  # reaches no other row
    actual, expected = (ops.grouped_gemm(x, ops.pack(gate_up), layout, gather=gather) for ops in (cpu, reference))
    assert actual.is_contiguous()
    assert_close(actual, expected)
    assert actual[-1:].isnan().all()


@pytest.mark.parametrize("num_rows", [29, 31])
def test_rows_that_do_not_fit_the_layout_are_refused(num_rows: int) -> None:
    gate_up, _ = weights(2, torch.float32)
    with pytest.raises(RuntimeError, match="split"):
        cpu.grouped_gemm(hidden_states(num_rows, torch.float32), cpu.pack(gate_up), layout_of([0, 30]), gather=False)


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
