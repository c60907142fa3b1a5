"""One way of a step's arrays to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from itertools import accumulate, cycle
from typing import Any, Protocol

import numpy as np
import numpy.typing as npt
import torch

# Where each array starts: kernels are compiled for pointers that 16 divides, and again for those it does not.
ALIGNMENT_BYTES = 16
# Of the first buffers: 256 rows of 50 blocks.
LEAST_BYTES = 1 << 16


class _Event(Protocol):
    """What of `torch.cuda.Event` is needed."""

    def record(self) -> None: ...

    def synchronize(self) -> None: ...


class _NoEvent:
    """On a CPU a copy is over when it returns."""

    def record(self) -> None:
        """Nothing is under way."""

    def synchronize(self) -> None:
        """Nothing to wait for."""


class StagingBuffer:
    """A host buffer, pinned where the device is a GPU, and its twin on the device: many arrays, one copy, no sync.

    Grows to powers of two; a step that needs no more than an earlier one allocates nothing. The copies run on the
    current stream, so whoever reads the twin on that stream is done before the next copy writes it. The host buffer has
    no such order: an event tells when the copy out of it is over.
    """

    def __init__(self, device: torch.device, copied: _Event) -> None:
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(0, dtype=torch.uint8)
        self._copied = copied  # recorded after each copy

    @classmethod
    def pair(cls, device: torch.device) -> Iterator[StagingBuffer]:
        """Two buffers in turn, for ever: with one step under way while the next is planned, neither waits."""
        make_event: Callable[[], _Event] = torch.cuda.Event if device.type == "cuda" else _NoEvent
        return cycle([cls(device, make_event()) for _ in range(2)])

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Tensors of the same shapes and types on the device, good until this buffer sends again."""
        ends = list(accumulate(-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays))
        starts = [0, *ends[:-1]]
        self._copied.synchronize()
        self._reserve(ends[-1])
        host = self._on_host.numpy()
        for start, array in zip(starts, arrays, strict=True):
            host[start : start + array.nbytes] = np.ascontiguousarray(array).reshape(-1).view(np.uint8)
        self._on_device[: ends[-1]].copy_(self._on_host[: ends[-1]], non_blocking=True)
        self._copied.record()
        return [self._view(start, array) for start, array in zip(starts, arrays, strict=True)]

    def _reserve(self, num_bytes: int) -> None:
        if num_bytes <= self._on_host.shape[0]:
            return
        size, device = max(LEAST_BYTES, 1 << (num_bytes - 1).bit_length()), self._on_device.device
        self._on_host = torch.empty(size, dtype=torch.uint8, pin_memory=device.type == "cuda")
        self._on_device = torch.empty(size, dtype=torch.uint8, device=device)

    def _view(self, start: int, array: npt.NDArray[Any]) -> torch.Tensor:
        dtype = torch.from_numpy(np.empty(0, dtype=array.dtype)).dtype
        return self._on_device[start : start + array.nbytes].view(dtype).view(array.shape)
