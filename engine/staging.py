"""Moves a step's arrays to the device in one copy, and its answers back in another.

On a GPU both copies go through pinned memory and neither waits; on a CPU arrays are used where they lie.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate, cycle
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

ALIGNMENT_BYTES = 16  # where arrays start: kernels are compiled anew for pointers that 16 does not divide
LEAST_BYTES = 1 << 16  # of the first buffers: 256 rows of 50 blocks

R = TypeVar("R")
S = TypeVar("S")

HostCopy = Callable[[], Sequence[torch.Tensor]]  # waits for the copy, then gives it; to be called once


class ArrayStaging:
    """Brings a step's arrays to the device: as they lie on a CPU, in one copy from pinned memory on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = StagingBuffer.pair(device) if device.type == "cuda" else None

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """The arrays as tensors on the device. Does not wait; on a GPU they last until the call after the next one."""
        if self._buffers is None:
            return [torch.from_numpy(array) for array in arrays]
        return next(self._buffers).send(arrays) if arrays else []


class _Event(Protocol):
    """What of `torch.cuda.Event` is needed."""

    def record(self) -> None: ...

    def query(self) -> bool: ...

    def synchronize(self) -> None: ...


class _NoEvent:
    """On a CPU a copy is over when it returns."""

    def record(self) -> None:
        """Nothing is under way."""

    def query(self) -> bool:
        """It is over."""
        return True

    def synchronize(self) -> None:
        """Nothing to wait for."""


class StagingBuffer:
    """A host buffer, pinned if the device is a GPU, and its twin on the device: many arrays, one copy, no sync.

    Grows to powers of two; a step that needs no more than an earlier one allocates nothing. The copies run on the
    current stream, so kernels on that stream have read the twin before the next copy overwrites it. For the host buffer
    an event tells when the copy out of it is over.
    """

    def __init__(self, device: torch.device, copied: _Event) -> None:
        self._on_device = torch.empty(0, dtype=torch.uint8, device=device)
        self._on_host = torch.empty(0, dtype=torch.uint8)
        self._copied = copied  # recorded after each copy

    @classmethod
    def pair(cls, device: torch.device) -> Iterator[StagingBuffer]:
        """Two buffers in turn, for ever: the next step is planned while one is under way, and neither waits."""
        make_event: Callable[[], _Event] = torch.cuda.Event if device.type == "cuda" else _NoEvent
        return cycle([cls(device, make_event()) for _ in range(2)])

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Tensors of the same shapes and types on the device, good until this buffer sends again."""
        ends = list(accumulate(-(-array.nbytes // ALIGNMENT_BYTES) * ALIGNMENT_BYTES for array in arrays))
        starts = [0, *ends[:-1]]
        if not self._copied.query():  # the copy of two steps before: long over, and asking does not wait
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


@dataclass(frozen=True, eq=False, slots=True)
class PendingResult(Generic[R]):
    """What was queued on the device, and how it is read once it is on the host."""

    tensors: tuple[torch.Tensor, ...]  # on the device
    read: Callable[[Sequence[torch.Tensor]], R]  # given copies of `tensors` on the host

    def now(self) -> R:
        """Wait for the device, copy and read."""
        return self.read([tensor.cpu() for tensor in self.tensors])

    def then(self, take: Callable[[R], S]) -> PendingResult[S]:
        """What `take` makes of the result."""
        return PendingResult(self.tensors, lambda on_host: take(self.read(on_host)))


class DeviceStream(Protocol):
    """The queue that forward passes and sampling are launched into: the current stream of a GPU.

    All answers of a step come back through here, and nothing else may wait for the device.
    """

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Queue one copy of all of these to the host, after what has been launched. Does not wait."""


def make_device_stream(device: torch.device) -> DeviceStream:
    """The stream that work for `device` is launched into."""
    return CudaStream() if device.type == "cuda" else CpuStream()


class CpuStream:
    """On a CPU what has been launched has run already, and lies on the host."""

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """See `DeviceStream.copy_back`. A copy here too: the next step may write where these lie."""
        copies = [tensor.clone() for tensor in tensors]
        return lambda: copies


class CudaStream:
    """Copies into pinned memory, which PyTorch reuses once a copy into it is over.

    It waits for an event, not for the stream: by then the next step is queued there.
    """

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """See `DeviceStream.copy_back`."""
        packed = pack(tensors)
        on_host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        on_host.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        copied.record()

        def wait() -> Sequence[torch.Tensor]:
            copied.synchronize()
            return unpack(on_host, tensors)

        return wait


def pack(tensors: Sequence[torch.Tensor]) -> torch.Tensor:
    """The bytes of all of them, at least one, concatenated; wide elements first, so that each is aligned."""
    pieces = [tensors[index].contiguous().view(-1).view(torch.uint8) for index in _order(tensors)]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)


def unpack(packed: torch.Tensor, like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Views of what `pack` made of tensors of these shapes and types, in their order."""
    views: dict[int, torch.Tensor] = {}
    start = 0
    for index in _order(like):
        end = start + like[index].nbytes
        views[index] = packed[start:end].view(like[index].dtype).view(like[index].shape)
        start = end
    return [views[index] for index in range(len(like))]


def _order(tensors: Sequence[torch.Tensor]) -> list[int]:
    return sorted(range(len(tensors)), key=lambda index: -tensors[index].itemsize)
