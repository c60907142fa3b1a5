"""What a step will have answered."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Generic, TypeVar

import torch

R = TypeVar("R")


@dataclass(frozen=True, eq=False, slots=True)
class PendingResult(Generic[R]):
    """What was queued on the device, and how it is read once it is on the host."""

    tensors: tuple[torch.Tensor, ...]  # on the device
    read: Callable[[Sequence[torch.Tensor]], R]  # given copies of `tensors` on the host

    def now(self) -> R:
        """Wait for the device, copy and read."""
        return self.read([tensor.cpu() for tensor in self.tensors])
