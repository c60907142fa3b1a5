"""Numbers of tokens that lead to the same kernels."""

from __future__ import annotations

from unittest import mock

import torch

import kernels.triton
from kernels.dispatch import launch_class_of, operations
from kernels.interface import StepShape
from kernels.triton import launch_class as module
from kernels.triton.launch_class import launch_class

DENSE = StepShape(hidden_size=1024, intermediate_size=3072, itemsize=2)
# Qwen3-30B-A3B
EXPERTS = StepShape(2048, 6144, 2, num_experts=128, top_k=8, expert_size=768, bucketed_min_tokens=4)


def _num_classes(shape: StepShape, tokens: range) -> int:
    with mock.patch.object(module, "compute_capability", return_value=90):
        return len({launch_class(count, shape) for count in tokens})


def test_a_dense_model_has_two_kinds_of_steps() -> None:
    assert _num_classes(DENSE, range(1, 4096)) == 1
    assert _num_classes(DENSE, range(1, 9000)) == 2


def test_experts_have_as_many_as_their_tuned_launches_and_more() -> None:
    assert _num_classes(EXPERTS, range(1, 4)) == 1
    assert 15 < _num_classes(EXPERTS, range(1, 2049)) < 30


def test_only_what_compiles_has_classes() -> None:
    assert launch_class_of(operations(torch.device("cpu")), DENSE) is None
    found = launch_class_of(kernels.triton, DENSE)
    assert found is not None
    assert found(1) == found(4095) != found(4096)
