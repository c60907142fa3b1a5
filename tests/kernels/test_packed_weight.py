from __future__ import annotations

import pytest
import torch

from kernels import cpu
from kernels.packed_weight import PackedWeight


@pytest.mark.parametrize("num_experts", [1, 3])
def test_the_matrices_of_an_unchanged_weight_are_views_made_once(num_experts: int) -> None:
    weight = torch.randn(num_experts, 5, 4)
    packed = PackedWeight.unchanged(weight)
    assert [matrix.data_ptr() for matrix in packed.matrices] == [matrix.data_ptr() for matrix in weight]
    assert [matrix.shape for matrix in packed.matrices] == [(5, 4)] * num_experts
    assert packed.matrices is packed.matrices
    assert packed.nbytes == weight.nbytes


@pytest.mark.parametrize("num_experts", [1, 3])
def test_the_matrices_of_experts_that_were_packed_one_by_one_are_their_parts(num_experts: int) -> None:
    packed = cpu.pack(torch.randn(num_experts, 5, 4).bfloat16())
    assert packed.matrices is packed.parts
    assert len(packed.matrices) == num_experts


def test_matrices_of_several_parts_are_refused() -> None:
    scaled = PackedWeight((torch.ones(5, 4), torch.ones(5)) * 3, (3, 5, 4))
    with pytest.raises(ValueError, match="unpack"):
        _ = scaled.matrices
