from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from kernels import reference
from kernels.attention_types import AttentionState
from kernels.triton.partial_attention import merge_attention_states
from tests.support.assert_close import assert_close
from tests.support.guarded_memory import GuardedMemory


@pytest.fixture(autouse=True)
def hostile_memory(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    memory = GuardedMemory()
    memory.install(monkeypatch)
    yield
    memory.check()


def check_state(actual: AttentionState, expected: AttentionState) -> None:
    assert_close(actual.output, expected.output)
    assert_close(actual.lse, expected.lse)


def random_state(dtype: torch.dtype, seed: int, head_dim: int) -> AttentionState:
    generator = torch.Generator().manual_seed(seed)
    output = torch.randn(23, 3, head_dim, generator=generator).to(dtype)
    return AttentionState(output, torch.randn(23, 3, generator=generator) * 20)


def merge_on(device: torch.device, first: AttentionState, second: AttentionState) -> AttentionState:
    states = (AttentionState(state.output.to(device), state.lse.to(device)) for state in (first, second))
    output, lse = merge_attention_states(*states)
    return AttentionState(output.cpu(), lse.cpu())


@pytest.mark.parametrize("head_dim", [80, 128])
def test_merge_agrees_with_the_reference(head_dim: int, dtype: torch.dtype, device: torch.device) -> None:
    first, second = random_state(dtype, 1, head_dim), random_state(dtype, 2, head_dim)
    first.lse[0, 0] = second.lse[1, 1] = first.lse[2, 2] = second.lse[2, 2] = -torch.inf
    first.output[2, 2] = second.output[2, 2] = 0
    first.lse[3, 0] = torch.nan
    first.lse[4], second.lse[4] = 300.0, 299.0  # exp(300) is not a float32
    check_state(merge_on(device, first, second), reference.merge_attention_states(first, second))
    views = AttentionState(*(tensor.transpose(0, 1).contiguous().transpose(0, 1) for tensor in first))
    check_state(merge_on(device, views, second), reference.merge_attention_states(first, second))


def test_what_saw_no_key_counts_for_nothing(device: torch.device) -> None:
    first, second = random_state(torch.float32, 1, 80), random_state(torch.float32, 2, 80)
    first.lse[0], second.lse[0] = -torch.inf, -torch.inf
    first.output[0] = torch.nan
    first.lse[1], second.lse[1] = torch.nan, -torch.inf
    first.lse[2], first.output[2] = -torch.inf, torch.nan
    second.lse[3], second.output[3] = -torch.inf, torch.nan
    merged = merge_on(device, first, second)
    assert (merged.output[0] == 0).all()
    assert (merged.lse[0] == -torch.inf).all()
    assert merged.lse[1].isnan().all()
    for row, other in ((2, second), (3, first)):
        assert_close(merged.output[row], other.output[row])
        assert_close(merged.lse[row], other.lse[row])


def test_merge_of_nothing_is_nothing(device: torch.device) -> None:
    empty = AttentionState(torch.zeros(0, 2, 16), torch.zeros(0, 2))
    assert merge_on(device, empty, empty).output.shape == (0, 2, 16)
