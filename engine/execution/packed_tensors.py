"""Many tensors as one."""

from __future__ import annotations

from collections.abc import Sequence

import torch


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all of them, at least one, one behind the other; wide elements first, so that each is aligned."""
    pieces = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in _order(tensors)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of `packed`, what `pack` made of tensors of these shapes and types, in their order."""
    views: dict[int, torch.Tensor] = {}
    start = 0
    for index in _order(like):
        end = start + like[index].nbytes
        views[index] = packed[start:end].view(like[index].dtype).view(like[index].shape)
        start = end
    return [views[index] for index in range(len(like))]


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
