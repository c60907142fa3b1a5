"""A device's memory on a machine without one: CPU tensors are counted as if they lay there."""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from engine.kv_cache import tensors as kv_cache_tensors
from engine.loading import derived_settings
from engine.loading import load as load_decoder_parts


class SimulatedMemory(TorchDispatchMode):  # type: ignore[no-untyped-call]  # of torch
    """Counts the memory of every tensor that an operation makes, from the first `reset_peak` on, until it is freed.

    What was there before, weights above all, is `held_bytes`. An operation that makes more than there is fails as a
    GPU's allocator does. What an operation takes inside of itself is not seen.
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
    """Engines loaded within the block measure this memory, as they would a GPU's, though they run on the CPU."""
    memory = SimulatedMemory(total_bytes, held_bytes)
    with pytest.MonkeyPatch.context() as patch, memory:
        for module in (derived_settings, load_decoder_parts):
            patch.setattr(module, "device_memory", lambda _: memory)
        # NumPy's pages, which the CPU's cache is made of, are nobody's operation.
        patch.setattr(kv_cache_tensors, "_zeros", lambda shape, dtype, _: torch.zeros(shape, dtype=dtype))
        yield memory


def _storages(values: Any) -> Iterator[torch.UntypedStorage]:
    for leaf in tree_leaves(values):
        if isinstance(leaf, torch.Tensor) and leaf.layout is torch.strided:
            yield leaf.untyped_storage()
