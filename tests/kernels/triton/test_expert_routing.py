from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import reference
from kernels.triton import experts as expert_sort
from kernels.triton.experts import route_topk, sort_tokens_by_expert
from tests.support.assert_close import assert_close
from tests.support.expert_layers import SHAPES, framed, randn
from tests.support.guarded_memory import GuardedMemory


@pytest.fixture(autouse=True)
def memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """What an operation forgets to write, or writes outside of its tensors, shows."""
    guarded = GuardedMemory()
    guarded.install(monkeypatch)
    yield
    guarded.check()


# route_topk


@pytest.mark.parametrize("renormalise", [False, True])
@pytest.mark.parametrize(("num_tokens", "num_experts", "top_k"), [*SHAPES, (3, 1, 1), (4, 60, 6), (2, 256, 8)])
def test_routing_agrees_with_the_reference(
    num_tokens: int, num_experts: int, top_k: int, renormalise: bool, device: torch.device, dtype: torch.dtype
) -> None:
    logits = framed(randn(num_tokens, num_experts, seed=3, device=device, dtype=dtype))
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
def test_a_row_without_probabilities_gets_nan_weights_and_the_first_experts(
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


@pytest.fixture(params=[False, True], ids=["one launch", "two launches"])
def several_blocks(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> bool:
    """Both ways to sort, whatever the number of pairs."""
    monkeypatch.setattr(expert_sort, "MAX_PAIRS_PER_EXPERT_SCAN", 0 if request.param else 1 << 20)
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


def test_sorting_reads_its_ids_over_several_steps(device: torch.device) -> None:
    ids = torch.randint(4, (1300, 2), generator=torch.Generator().manual_seed(7)).to(device)
    assert_sorted(ids, 4)


def test_more_pairs_than_one_launch_takes_are_sorted_in_two(device: torch.device) -> None:
    assert_sorted(torch.randint(3, (4111, 1), generator=torch.Generator().manual_seed(8)).to(device), 3)


def test_sorting_no_tokens_gives_offsets_of_zero(device: torch.device) -> None:
    layout = sort_tokens_by_expert(torch.empty(0, 4, dtype=torch.int64, device=device), 9)
    assert layout.pair_ids.shape == (0,)
    assert layout.expert_offsets.tolist() == [0] * 10
