"""Stands in for a GPU and its memory on a machine without one.

CPU tensors are counted as if they lay on a device, a stream writes down what the host asks of it, and what would make
the host wait is forbidden. Fresh memory is as hostile as it can be, full of NaN with guards on both sides, and a tensor
of more elements than an int32 can count takes little memory. Triton's interpreter, which runs kernels there, is mended.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.loading import derived_settings, load
from engine.staging import HostCopy, pack, unpack

# Calls that read a tensor on the host, or copy between host and device through memory that is not pinned. So does
# torch.where with a number.
READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__", "__contains__",
    "numpy", "__array__", "cpu", "cuda", "to", "nonzero", "masked_select", "unique",
    "equal", "allclose", "tensor", "as_tensor",
}  # fmt: skip
INDEXING = {"__getitem__", "__setitem__"}

_GUARD_ELEMENTS = 4096  # more than a tile of any kernel reaches past a row's end; a multiple of 16 bytes
_GUARD = 77

PAST_INT32_ELEMENTS = 2**31 + 2**16


class SimulatedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Counts the memory of tensors that operations make after the first `reset_peak`, until they are freed.

    `held_bytes` was there before, weights above all. An operation that asks for more than is left fails as a GPU's
    allocator does. What an operation needs while it runs is not seen.
    """

    def __init__(self, total_bytes: int, held_bytes: int = 0) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # of torch
        self.total_bytes = total_bytes
        self.rounding_bytes = 0
        self.held_bytes = held_bytes
        self.counts = False
        self.taken_bytes = 0
        self.most_bytes = 0  # since reset_peak
        self._live: set[int] = set()

    def free_bytes(self) -> int:
        return self.total_bytes - self.held_bytes - self.taken_bytes

    def reset_peak(self) -> None:
        self.counts = True
        self.most_bytes = self.taken_bytes

    def peak_bytes(self) -> int:
        return self.held_bytes + self.most_bytes

    def __torch_dispatch__(
        self,
        func: Callable[..., Any],
        types: Sequence[type],
        args: Sequence[Any] = (),
        kwargs: Mapping[str, Any] | None = None,
    ) -> Any:
        result = func(*args, **(kwargs or {}))
        if self.counts:
            known = {storage._cdata for storage in _storages((args, kwargs))}
            for storage in _storages(result):
                if storage._cdata not in known and storage._cdata not in self._live:
                    self._take(storage)
        return result

    def _take(self, storage: torch.UntypedStorage) -> None:
        num_bytes = storage.nbytes()
        if num_bytes > self.free_bytes():
            raise torch.OutOfMemoryError(f"CUDA out of memory. Tried to allocate {num_bytes} bytes.\nSimulated.")
        self._live.add(storage._cdata)
        self.taken_bytes += num_bytes
        self.most_bytes = max(self.most_bytes, self.taken_bytes)
        weakref.finalize(storage, self._give_back, storage._cdata, num_bytes)

    def _give_back(self, storage_id: int, num_bytes: int) -> None:
        self._live.discard(storage_id)
        self.taken_bytes -= num_bytes


@contextmanager
def simulated_device(total_bytes: int, held_bytes: int = 0) -> Iterator[SimulatedMemory]:
    """Let engines that are loaded within the block measure this memory as a GPU's, though they run on the CPU."""
    memory = SimulatedMemory(total_bytes, held_bytes)
    with pytest.MonkeyPatch.context() as patch, memory:
        for module in (derived_settings, load):
            patch.setattr(module, "device_memory", lambda _: memory)
        # Pages mapped by hand, which the cache of a CPU is made of, are no operation of PyTorch.
        patch.setattr("engine.kv_cache.tensors.in_huge_pages", lambda n: torch.zeros(n, dtype=torch.uint8))
        yield memory


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()


class RecordingStream:
    """Copies through one buffer, as to a GPU's host, and notes `copy N` when one is queued, `wait N` when it is read.

    The bytes are those of the moment a copy was queued: what the host overwrites later is not seen.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_copies = 0

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        number, self.num_copies = self.num_copies, self.num_copies + 1
        packed = pack(tensors).clone()
        self.events.append(f"copy {number}")

        def wait() -> Sequence[torch.Tensor]:
            self.events.append(f"wait {number}")
            return unpack(packed, tensors)

        return wait


class NoHostReads(TorchFunctionMode):
    """Raises where a tensor is read on the host; kernels and staged copies, which a device would run, may."""

    def __init__(self) -> None:
        super().__init__()
        self._num_kernels = 0
        self.num_calls = 0  # calls looked at

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        if not self._num_kernels:
            name = getattr(func, "__name__", "")
            self.num_calls += 1
            has_number = name == "where" and not all(isinstance(arg, torch.Tensor) for arg in args)
            if name in READS or has_number or (name in INDEXING and _has_mask_or_list(args[1])):
                raise AssertionError(f"the host waits for the device: {name}")
        return func(*args, **(kwargs or {}))

    def kernel(self, function: Callable[..., Any]) -> Callable[..., Any]:
        """`function` as a kernel: it may read its tensors."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_kernels += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._num_kernels -= 1

        return run


class KernelOperations:
    """Operations that `guard` takes for kernels."""

    def __init__(self, ops: object, guard: NoHostReads) -> None:
        self._ops = ops
        self._guard = guard

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._guard.kernel(getattr(self._ops, name))


def _has_mask_or_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, list) or (isinstance(p, torch.Tensor) and p.dtype == torch.bool) for p in parts)


@contextmanager
def interpreter_beside_numpy() -> Iterator[None]:
    """Within the block triton 3.6's interpreter, PyTorch 2.11's, takes bounds of loops that were computed or loaded.

    It asks arrays of one element for an integer, which NumPy refuses from 2.4 on. Triton 3.7 asks as is done here.
    """
    import triton  # here: only Linux has it
    from triton.runtime import interpreter

    patched = interpreter._patch_lang_tensor

    def patch_lang_tensor(tensor: Any, scope: Any) -> None:
        patched(tensor, scope)
        scope.set_attr(tensor, "__index__", lambda value: int(value.handle.data.item()))

    with pytest.MonkeyPatch.context() as patch:
        if triton.__version__.startswith("3.6."):
            patch.setattr(interpreter, "_patch_lang_tensor", patch_lang_tensor)
        yield


class GuardedMemory:
    """Stands for torch.empty, torch.empty_like and Tensor.new_empty while it is installed.

    Floats start as NaN and integers as the lowest value, which shows what a kernel left out. `check` finds writes
    outside of a tensor, which the sequential interpreter would let pass.
    """

    def __init__(self) -> None:
        self._empty = torch.empty
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Replace torch's functions until monkeypatch puts them back."""

        def new_empty(
            tensor: torch.Tensor, *size: Any, dtype: torch.dtype | None = None, device: Any = None
        ) -> torch.Tensor:
            return self.empty(*size, dtype=dtype or tensor.dtype, device=device or tensor.device)

        monkeypatch.setattr(torch, "empty", self.empty)
        monkeypatch.setattr(torch, "empty_like", self._empty_like)
        monkeypatch.setattr(torch.Tensor, "new_empty", new_empty)

    def empty(self, *size: Any, dtype: torch.dtype | None = None, device: Any = None) -> torch.Tensor:
        """Takes the arguments of torch.empty that kernels use."""
        shape = torch.Size(size[0] if len(size) == 1 and not isinstance(size[0], int) else size)
        if shape.numel() == 0:  # Triton's interpreter makes these, to point them elsewhere
            return self._empty(shape, dtype=dtype, device=device)
        buffer = self._empty(shape.numel() + 2 * _GUARD_ELEMENTS, dtype=dtype, device=device).fill_(_GUARD)
        self._buffers.append((buffer, shape.numel()))
        tensor = buffer[_GUARD_ELEMENTS : _GUARD_ELEMENTS + shape.numel()]
        tensor.fill_(torch.nan if buffer.is_floating_point() else _lowest(buffer.dtype))
        return tensor.view(shape)

    def check(self) -> None:
        """Raise AssertionError where a guard has changed."""
        for buffer, numel in self._buffers:
            for name, guard in (
                ("before", buffer[:_GUARD_ELEMENTS]),
                ("after", buffer[_GUARD_ELEMENTS + numel :]),
            ):
                if not bool((guard == _GUARD).all()):
                    raise AssertionError(f"a kernel wrote {name} a tensor of {numel} elements, {buffer.dtype}")

    def _empty_like(self, tensor: torch.Tensor, *, dtype: torch.dtype | None = None) -> torch.Tensor:
        return self.empty(tensor.shape, dtype=dtype or tensor.dtype, device=tensor.device)


def _lowest(dtype: torch.dtype) -> int:
    return 0 if dtype is torch.bool else torch.iinfo(dtype).min


def past_int32_storage(directory: Path, device: torch.device) -> torch.Tensor:
    """A flat float16 tensor of 2^31 + 2^16 zeros: on a CPU a sparse file, of which only touched pages exist."""
    if device.type != "cpu":
        return torch.zeros(PAST_INT32_ELEMENTS, dtype=torch.float16, device=device)
    return torch.from_file(str(directory / "sparse"), shared=True, size=PAST_INT32_ELEMENTS, dtype=torch.float16)
