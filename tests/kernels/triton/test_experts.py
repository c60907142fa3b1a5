"""Triton routing, sorting and products of experts agree with the reference."""

from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from kernels import reference
from kernels.operands import ExpertLayout, ExpertOutputs, RoutedExperts
from kernels.triton import experts
from kernels.triton.combine_experts import add_experts_rms_norm, combine_experts
from kernels.triton.dense import fused_add_rms_norm, silu_and_mul
from kernels.triton.experts import route_and_sort, route_topk, sort_tokens_by_expert
from kernels.triton.grouped_gemm import grouped_gemm, row_tile
from kernels.triton.launch import TileLaunch
from kernels.triton.moe_small_batch import moe_small_batch
from kernels.triton.quantised import pack
from tests.support.devices import past_int32_storage
from tests.support.tensors import SHAPES, assert_close, assert_same_bits, expert_weights, framed, on_cpu, randn, routing
from tests.support.tensors import layout_of as reference_layout_of

pytestmark = pytest.mark.usefixtures("guarded_memory")

IS_INTERPRETED = os.environ.get("TRITON_INTERPRET") == "1"


def layout_of(expert_ids: torch.Tensor, num_experts: int) -> ExpertLayout:
    """The reference's order of the pairs, with the places and tiles of these kernels."""
    expected = reference_layout_of(expert_ids, num_experts)
    found = sort_tokens_by_expert(expert_ids, num_experts)
    return replace(expected, places=found.places, tiles=found.tiles, tile_rows=found.tile_rows)


def assert_gemm_agrees(x: torch.Tensor, weight: torch.Tensor, layout: ExpertLayout, *, gather: bool) -> None:
    """With the gate, too, where the weight can have one: to the bit what it is behind the product."""
    outputs = []
    for gated in (False, True) if weight.shape[1] % 2 == 0 else (False,):
        outputs.append(grouped_gemm(x, pack(weight), layout, gather=gather, gated=gated))
        expected = reference.grouped_gemm(x.cpu(), pack(weight.cpu()), on_cpu(layout), gather=gather, gated=gated)
        assert_close(outputs[-1].cpu(), expected)
    if len(outputs) > 1 and x.dtype != torch.float32:  # which rounds nothing, and the interpreter sums in another order
        assert_same_bits(outputs[1], silu_and_mul(outputs[0]))


# grouped_gemm
@pytest.mark.parametrize("gather", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_grouped_gemm_agrees_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, gather: bool, device: torch.device, dtype: torch.dtype
) -> None:
    layout = layout_of(routing(num_tokens, num_experts, top_k, device).expert_ids, num_experts)
    x = framed(randn(num_tokens if gather else num_tokens * top_k, 72, seed=5, device=device, dtype=dtype))
    assert_gemm_agrees(x, expert_weights(num_experts, 80, 72, device, dtype), layout, gather=gather)


@pytest.mark.parametrize("depth", [256, 296])  # 2 or 4 whole steps, then none or a tail
def test_grouped_gemm_over_several_steps_of_depth(depth: int, device: torch.device, dtype: torch.dtype) -> None:
    layout = layout_of(routing(9, 3, 2, device).expert_ids, 3)
    x = framed(randn(9, depth, seed=5, device=device, dtype=dtype))
    assert_gemm_agrees(x, expert_weights(3, 33, depth, device, dtype), layout, gather=True)


# Pairs an expert gets -> rows of a tile: 16, 32 (both swapped in half precision), 64 and 128 (not swapped).
@pytest.mark.parametrize("num_tokens", [12, 25, 64, 150])
@pytest.mark.parametrize("gather", [False, True])
def test_grouped_gemm_with_every_height_of_tile(
    num_tokens: int, gather: bool, device: torch.device, dtype: torch.dtype
) -> None:
    layout = layout_of(routing(num_tokens, 4, 2, device).expert_ids, 4)
    x = framed(randn(num_tokens if gather else num_tokens * 2, 40, seed=5, device=device, dtype=dtype))
    assert_gemm_agrees(x, expert_weights(4, 70, 40, device, dtype), layout, gather=gather)


@pytest.mark.parametrize("expert", [0, 2, 5])
@pytest.mark.parametrize("gather", [False, True])
def test_grouped_gemm_when_one_expert_takes_every_token(
    expert: int, gather: bool, device: torch.device, dtype: torch.dtype
) -> None:
    layout = layout_of(torch.full((37, 1), expert, device=device), 6)
    x = framed(randn(37, 72, seed=5, device=device, dtype=dtype))
    assert_gemm_agrees(x, expert_weights(6, 40, 72, device, dtype), layout, gather=gather)


def test_grouped_gemm_in_groups_of_row_tiles(device: torch.device, dtype: torch.dtype) -> None:
    """33 tokens of 128 experts, 8 each: a tuned line with groups of 16 row tiles, the last of 8, all in use."""
    ids = torch.cat((torch.arange(128), torch.arange(120, 128).repeat(16), torch.arange(8))).view(33, 8).to(device)
    layout = layout_of(ids, 128)
    assert layout.tiles is not None
    assert layout.tiles.shape[0] == 8 * 16 + 8
    assert bool((layout.tiles[:, 0] >= 0).all())
    x = framed(randn(33, 24, seed=5, device=device, dtype=dtype))
    assert_gemm_agrees(x, expert_weights(128, 70, 24, device, dtype), layout, gather=True)


@pytest.fixture
def wide_buffer(tmp_path: Path, device: torch.device) -> torch.Tensor:
    return past_int32_storage(tmp_path, device)


def far_apart(buffer: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """The tensor, of three experts or rows, with the third 2^31 elements after the first."""
    return buffer.as_strided(tuple(tensor.shape), (1 << 30, *tensor.contiguous().stride()[1:])).copy_(tensor)


def test_an_expert_may_lie_further_than_32_bits_reach(wide_buffer: torch.Tensor, device: torch.device) -> None:
    routed = RoutedExperts(torch.ones(3, 1, device=device), torch.tensor([[2], [0], [2]], device=device))
    x = randn(3, 24, seed=5, device=device, dtype=torch.float16)
    gate_up = expert_weights(3, 16, 24, device, torch.float16)
    down = expert_weights(3, 24, 8, device, torch.float16, seed=9)
    expected = moe_small_batch(x, pack(gate_up), pack(down), routed)
    layout = layout_of(routed.expert_ids, 3)
    assert_gemm_agrees(x, far_apart(wide_buffer, gate_up), layout, gather=True)
    assert_gemm_agrees(far_apart(wide_buffer, x), gate_up, layout, gather=False)
    assert_close(moe_small_batch(x, pack(far_apart(wide_buffer, gate_up)), pack(down), routed), expected)
    assert_close(moe_small_batch(x, pack(gate_up), pack(far_apart(wide_buffer, down)), routed), expected)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available() or IS_INTERPRETED, reason="needs an NVIDIA GPU")
@pytest.mark.parametrize("num_tokens", [1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 256, 512, 1024, 1536])
def test_grouped_gemm_of_qwen3_30b_a3b_agrees_with_the_reference(num_tokens: int, device: torch.device) -> None:
    """Every line of the launch table at its real shape; the reference is float32 expert by expert."""
    layout = layout_of(routing(num_tokens, 128, 8, device).expert_ids, 128)
    x = randn(num_tokens, 2048, seed=5, device=device, dtype=torch.bfloat16)
    weight = randn(128, 1536, 2048, seed=4, device=device).div(2048**0.5).to(torch.bfloat16)
    sources = layout.pair_ids // 8
    expected = torch.zeros(num_tokens * 8, 1536, dtype=torch.bfloat16, device=device)
    for expert, (start, end) in enumerate(zip(layout.expert_offsets, layout.expert_offsets[1:], strict=False)):
        expected[start:end] = reference.linear(x[sources[start:end]], pack(weight[expert]))
    assert_close(grouped_gemm(x, pack(weight), layout, gather=True), expected)


# moe_small_batch


# Depths of less than a step, of whole steps, and of steps and a tail (steps are 256 and 128 deep in float32, 512 and
# 256 in float16), once for the first product and once for the second.
@pytest.mark.parametrize(
    ("num_tokens", "num_experts", "top_k", "hidden_size", "intermediate_size"),
    [
        (1, 8, 2, 72, 40),
        (3, 5, 3, 72, 40),
        (2, 4, 1, 512, 256),
        (2, 5, 3, 1060, 5),
        (2, 5, 3, 21, 530),
        (1, 12, 8, 130, 70),
    ],
)
def test_the_short_cut_agrees_with_the_reference(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    hidden_size: int,
    intermediate_size: int,
    device: torch.device,
    dtype: torch.dtype,
) -> None:
    routed = routing(num_tokens, num_experts, top_k, device)
    x = framed(randn(num_tokens, hidden_size, seed=5, device=device, dtype=dtype))
    gate_up = expert_weights(num_experts, 2 * intermediate_size, hidden_size, device, dtype)
    down = expert_weights(num_experts, hidden_size, intermediate_size, device, dtype, seed=9)
    actual = moe_small_batch(x, pack(gate_up), pack(down), routed)
    expected = reference.moe_small_batch(
        x.cpu(),
        pack(gate_up.cpu()),
        pack(down.cpu()),
        RoutedExperts(routed.weights.cpu(), routed.expert_ids.cpu()),
    )
    assert_close(actual.cpu(), expected)


def test_the_short_cut_shows_a_poisoned_token_and_no_other(device: torch.device, dtype: torch.dtype) -> None:
    routed = routing(3, 8, 3, device)
    routed.weights[1] = torch.nan
    out = moe_small_batch(
        randn(3, 72, seed=5, device=device, dtype=dtype),
        pack(expert_weights(8, 80, 72, device, dtype)),
        pack(expert_weights(8, 72, 40, device, dtype)),
        routed,
    )
    assert out[1].isnan().all()
    assert out[[0, 2]].isfinite().all()


def test_the_short_cut_rounds_each_expert_as_the_sorted_way_does(device: torch.device) -> None:
    """1 + 2^-12 and -1: the first is 1 in float16, so the sum is 0. All numbers and sums are exact in float32."""
    x = torch.ones(1, 1, dtype=torch.float16, device=device)
    gate_up = torch.tensor([32.0, 32.0, 1 / 32, 1 / 32], dtype=torch.float16, device=device).expand(2, 4)[..., None]
    down = torch.tensor([[[1.0, 2.0**-12]], [[-1.0, 0.0]]], dtype=torch.float16, device=device)
    routed = RoutedExperts(torch.ones(1, 2, device=device), torch.tensor([[0, 1]], device=device))
    assert moe_small_batch(x, pack(gate_up), pack(down), routed).item() == 0.0


def test_gates_and_ups_are_rounded_both_ways(device: torch.device) -> None:
    """2049 is 2048 in float16: three times it is 6144 and not 6148, 24 times 49152 and not 49184."""
    gate_up = torch.tensor([[[2048.0, 1], [3, 0]], [[24, 0], [2048, 1]]], dtype=torch.float16, device=device)
    routed = RoutedExperts(torch.ones(2, 1, device=device), torch.tensor([[0], [1]], device=device))
    x, down = (torch.ones(*shape, dtype=torch.float16, device=device) for shape in ((2, 2), (2, 2, 1)))
    assert moe_small_batch(x, pack(gate_up), pack(down), routed)[:, 0].tolist() == [6144, 49152]
    sorted_too = grouped_gemm(x, pack(gate_up), layout_of(routed.expert_ids, 2), gather=True, gated=True)
    assert sorted_too[:, 0].tolist() == [6144, 49152]


# combine_experts
@pytest.mark.parametrize("hidden_size", [72, 520])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_combining_agrees_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    routed = routing(num_tokens, num_experts, top_k, device)
    layout = layout_of(routed.expert_ids, num_experts)
    rows = framed(randn(num_tokens * top_k, hidden_size, seed=5, device=device, dtype=dtype))
    actual = combine_experts(rows, layout, routed.weights)
    assert_close(actual.cpu(), reference.combine_experts(rows.cpu(), on_cpu(layout), routed.weights.cpu()))


@pytest.mark.parametrize("hidden_size", [72, 520])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), SHAPES)
def test_the_norm_of_what_experts_add_is_that_of_both(
    num_tokens: int, num_experts: int, top_k: int, hidden_size: int, device: torch.device, dtype: torch.dtype
) -> None:
    """To the bit what the two operations give; the residual lies between other rows and columns, which stay."""
    routed = routing(num_tokens, num_experts, top_k, device)
    layout = layout_of(routed.expert_ids, num_experts)
    rows = framed(randn(num_tokens * top_k, hidden_size, seed=5, device=device, dtype=dtype))
    weight = randn(hidden_size, seed=6, device=device, dtype=dtype)
    around = randn(num_tokens + 2, hidden_size + 3, seed=7, device=device, dtype=dtype)
    expected_around, residual = around.clone(), around[1:-1, :hidden_size].cpu().clone()
    out = add_experts_rms_norm(ExpertOutputs(rows, layout, routed.weights), around[1:-1, :hidden_size], weight, 1e-2)
    total = combine_experts(rows, layout, routed.weights)
    assert_same_bits(out, fused_add_rms_norm(total, expected_around[1:-1, :hidden_size], weight, 1e-2))
    assert_same_bits(around, expected_around)
    outputs = ExpertOutputs(rows.cpu(), on_cpu(layout), routed.weights.cpu())
    assert_close(out.cpu(), reference.add_experts_rms_norm(outputs, residual, weight.cpu(), 1e-2))
    assert_close(around[1:-1, :hidden_size].cpu(), residual)


def test_a_residual_whose_elements_lie_apart_is_refused(device: torch.device) -> None:
    layout = layout_of(torch.zeros(4, 1, dtype=torch.int64, device=device), 2)
    outputs = ExpertOutputs(torch.zeros(4, 8, device=device), layout, torch.ones(4, 1, device=device))
    with pytest.raises(ValueError, match=r"residual has strides \(1, 4\)"):
        add_experts_rms_norm(outputs, torch.zeros(8, 4, device=device).t(), torch.ones(8, device=device), 1e-6)


def test_a_row_may_lie_further_than_32_bits_reach(wide_buffer: torch.Tensor, device: torch.device) -> None:
    layout = layout_of(torch.tensor([[2, 0, 1]], device=device), 3)
    rows = far_apart(wide_buffer, randn(3, 24, seed=5, device=device))
    weights = torch.tensor([[0.25, 0.5, 0.75]], device=device)
    expected = reference.combine_experts(rows.cpu(), on_cpu(layout), weights.cpu())
    assert_close(combine_experts(rows, layout, weights).cpu(), expected)


def test_combining_many_tokens_agrees_with_the_reference(device: torch.device) -> None:
    ids = torch.randint(3, (259, 1), generator=torch.Generator().manual_seed(6)).to(device)
    layout, weights = layout_of(ids, 3), randn(259, 1, seed=7, device=device)
    rows = randn(24, 259, seed=5, device=device).t()  # its elements lie apart
    expected = reference.combine_experts(rows.cpu(), on_cpu(layout), weights.cpu())
    assert_close(combine_experts(rows, layout, weights).cpu(), expected)


def test_a_poisoned_token_poisons_no_other(device: torch.device, dtype: torch.dtype) -> None:
    routed = routing(5, 6, 2, device)
    layout = layout_of(routed.expert_ids, 6)
    rows = randn(10, 40, seed=5, device=device, dtype=dtype)
    rows[layout.pair_ids // 2 == 3] = torch.nan
    out = combine_experts(rows, layout, routed.weights)
    assert out[3].isnan().all()
    assert out[[0, 1, 2, 4]].isfinite().all()


# the layer
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [(1, 8, 2), (5, 12, 3)])
def test_no_tokens_give_no_rows_and_some_the_same_both_ways(
    num_tokens: int, num_experts: int, top_k: int, device: torch.device, dtype: torch.dtype
) -> None:
    gate_up = pack(expert_weights(num_experts, 80, 72, device, dtype))
    down = pack(expert_weights(num_experts, 72, 40, device, dtype, seed=9))
    for tokens in (0, num_tokens):
        x = randn(tokens, 72, seed=5, device=device, dtype=dtype)
        routed = route_topk(randn(tokens, num_experts, seed=3, device=device, dtype=dtype), top_k, renormalise=True)
        layout = sort_tokens_by_expert(routed.expert_ids, num_experts)
        hidden = grouped_gemm(x, gate_up, layout, gather=True, gated=True)
        out = combine_experts(grouped_gemm(hidden, down, layout, gather=False), layout, routed.weights)
        assert out.shape == (tokens, 72)
        assert_close(moe_small_batch(x, gate_up, down, routed), out)


# route_topk
@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [*SHAPES, (3, 1, 1), (4, 60, 6), (2, 256, 8)])
def test_routing_agrees_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, renormalise: bool, device: torch.device, dtype: torch.dtype
) -> None:
    for spread in (1, 300):  # exponentials of the second overflow
        logits = framed(randn(num_tokens, num_experts, seed=3, device=device, dtype=dtype) * spread)
        actual = route_topk(logits, top_k, renormalise=renormalise)
        expected = reference.route_topk(logits.cpu(), top_k, renormalise=renormalise)
        assert_close(actual.expert_ids.cpu(), expected.expert_ids)
        assert_close(actual.weights.cpu(), expected.weights)


def test_ties_go_to_the_lower_expert(device: torch.device) -> None:
    logits = torch.zeros(3, 20, device=device)
    logits[1, [5, 9, 14]] = 1.0
    logits[2] = -200.0  # all probabilities but two are 0 in float32: a tie as well
    logits[2, [7, 19]] = 0.0
    ids = route_topk(logits, 5, renormalise=True).expert_ids.tolist()
    assert ids == [[0, 1, 2, 3, 4], [5, 9, 14, 0, 1], [7, 19, 0, 1, 2]]


@pytest.mark.filterwarnings("ignore:invalid value:RuntimeWarning")  # numpy's, in the interpreter
@pytest.mark.parametrize("poison", [float("nan"), float("inf")])
def test_a_row_without_probabilities_gets_nan_and_the_first_experts(
    poison: float, device: torch.device, dtype: torch.dtype
) -> None:
    logits = randn(4, 12, seed=3, device=device, dtype=dtype)
    logits[1, 6] = poison
    logits[3] = -float("inf")
    routed = route_topk(logits, 3, renormalise=True)
    expected = reference.route_topk(logits.cpu(), 3, renormalise=True)
    assert routed.weights[[1, 3]].isnan().all()
    assert routed.expert_ids[[1, 3]].tolist() == [[0, 1, 2], [0, 1, 2]]
    assert_close(routed.weights.cpu(), expected.weights)
    assert_close(routed.expert_ids.cpu(), expected.expert_ids)


# sort_tokens_by_expert
def assert_sorted(expert_ids: torch.Tensor, num_experts: int) -> None:
    actual = sort_tokens_by_expert(expert_ids, num_experts)
    expected = reference.sort_tokens_by_expert(expert_ids.cpu(), num_experts)
    assert_close(actual.pair_ids.cpu(), expected.pair_ids)
    assert_close(actual.expert_offsets.cpu(), expected.expert_offsets)
    assert actual.top_k == expected.top_k
    assert_is_complete(actual, num_experts)


def assert_is_complete(layout: ExpertLayout, num_experts: int) -> None:
    """Each pair has its place, and each row is in one tile of its expert."""
    assert layout.places is not None
    assert layout.tiles is not None
    num_pairs = layout.pair_ids.shape[0]
    assert layout.places[layout.pair_ids].tolist() == list(range(num_pairs))
    rows: list[int] = []
    offsets = layout.expert_offsets.tolist()
    height = row_tile(num_pairs, layout.top_k, num_experts)
    tiles = layout.tiles.tolist()
    used = [tile for tile in tiles if tile[0] >= 0]
    assert tiles[: len(used)] == used
    assert {expert for expert, *_ in tiles[len(used) :]} <= {-1}
    for expert, first, end, _ in used:
        assert offsets[expert] <= first < end == offsets[expert + 1]
        rows += range(first, min(first + height, end))
    assert rows == list(range(num_pairs))


@pytest.fixture(params=[False, True], ids=["one launch", "two launches"])
def several_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to sort, where one launch could."""
    if request.param:
        monkeypatch.setattr(experts, "MAX_PAIRS_OF_ONE_PROGRAM", 0)
    return bool(request.param)


@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [*SHAPES, (7, 1, 1), (211, 7, 6), (9, 100, 8)])
@pytest.mark.usefixtures("several_blocks")
def test_sorting_agrees_with_the_reference(num_tokens: int, num_experts: int, top_k: int, device: torch.device) -> None:
    generator = torch.Generator().manual_seed(6)
    assert_sorted(torch.randint(num_experts, (num_tokens, top_k), generator=generator).to(device), num_experts)


@pytest.mark.parametrize("expert", [0, 3, 5])
@pytest.mark.usefixtures("several_blocks")
def test_sorting_when_one_expert_takes_every_pair(expert: int, device: torch.device) -> None:
    assert_sorted(torch.full((150, 2), expert, device=device), 6)


def test_more_pairs_than_one_launch_takes_are_sorted_in_two(device: torch.device) -> None:
    assert_sorted(torch.randint(3, (4111, 1), generator=torch.Generator().manual_seed(8)).to(device), 3)


def test_blocks_of_pairs_are_counted_in_several_steps(monkeypatch: pytest.MonkeyPatch, device: torch.device) -> None:
    """12 blocks of 16 pairs, the last one short, of which a program sums the counts of 4 at a time."""
    monkeypatch.setattr(experts, "MAX_PAIRS_OF_ONE_PROGRAM", 0)
    monkeypatch.setattr(experts, "expert_count_launch", lambda: TileLaunch(4, 16, 4))
    assert_sorted(torch.randint(7, (59, 3), generator=torch.Generator().manual_seed(6)).to(device), 7)


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [*SHAPES, (4, 60, 6), (2, 256, 8)])
def test_routing_and_sorting_in_one_launch_is_both(
    num_tokens: int,
    num_experts: int,
    top_k: int,
    renormalise: bool,
    device: torch.device,
    dtype: torch.dtype,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    logits = framed(randn(num_tokens, num_experts, seed=3, device=device, dtype=dtype))
    num_routed = torch.zeros(1, dtype=torch.int32, device=device)
    monkeypatch.setattr(experts, "_num_routed", lambda _: num_routed)
    for _ in range(2):
        weights, layout = route_and_sort(logits, top_k, renormalise=renormalise)
        routed = reference.route_topk(logits.cpu(), top_k, renormalise=renormalise)
        assert_close(weights.cpu(), routed.weights)
        expected = reference.sort_tokens_by_expert(routed.expert_ids, num_experts)
        assert_close(layout.pair_ids.cpu(), expected.pair_ids)
        assert_close(layout.expert_offsets.cpu(), expected.expert_offsets)
        assert_is_complete(layout, num_experts)
        assert num_routed.item() == 0  # else the next launch sorts before all have been routed


@pytest.mark.parametrize("num_tokens", [0, 5])
def test_pairs_that_one_program_does_not_sort_are_routed_first(
    num_tokens: int, monkeypatch: pytest.MonkeyPatch, device: torch.device
) -> None:
    monkeypatch.setattr(experts, "MAX_PAIRS_OF_ONE_PROGRAM", 9)
    logits = randn(num_tokens, 7, seed=3, device=device)
    weights, layout = route_and_sort(logits, 2, renormalise=True)
    expected_weights, expected = reference.route_and_sort(logits.cpu(), 2, renormalise=True)
    assert_close(weights.cpu(), expected_weights)
    assert_close(layout.pair_ids.cpu(), expected.pair_ids)
    assert_close(layout.expert_offsets.cpu(), expected.expert_offsets)


def test_a_product_wants_tiles(device: torch.device) -> None:
    layout = reference_layout_of(torch.zeros(3, 1, dtype=torch.int64, device=device), 2)
    with pytest.raises(ValueError, match=r"no tiles; accepted: one that kernels\.triton has sorted"):
        grouped_gemm(torch.zeros(3, 8, device=device), pack(torch.zeros(2, 16, 8, device=device)), layout, gather=True)


def test_sorting_no_tokens_gives_offsets_of_zero(device: torch.device) -> None:
    layout = sort_tokens_by_expert(torch.empty(0, 4, dtype=torch.int64, device=device), 9)
    assert layout.pair_ids.shape == (0,)
    assert layout.expert_offsets.tolist() == [0] * 10
