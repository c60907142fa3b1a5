"""Tensors that travel to the host as one."""

from __future__ import annotations

import torch

from engine.staging import pack, unpack


def test_tensors_of_any_type_and_shape_come_out_as_they_went_in() -> None:
    tensors = [
        torch.tensor([True, False, True]),
        torch.randn(3, 5),
        torch.arange(7) - 3,
        torch.empty(2, 0),
        torch.randn(4, 6).t()[1:],
        torch.arange(5, dtype=torch.int32),
        torch.randn(3).bfloat16(),
        torch.tensor(2.5, dtype=torch.float64),
    ]
    packed = pack(tensors)
    assert packed.shape == (sum(tensor.nbytes for tensor in tensors),)
    for found, expected in zip(unpack(packed, tensors), tensors, strict=True):
        assert (found.dtype, found.shape) == (expected.dtype, expected.shape)
        assert torch.equal(found, expected)


def test_one_alone_is_not_copied() -> None:
    tensor = torch.arange(4)
    packed = pack([tensor])
    assert packed.data_ptr() == tensor.data_ptr()
    assert torch.equal(unpack(packed, [tensor])[0], tensor)
