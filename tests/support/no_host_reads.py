"""Forbids what would make the host wait for a device."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch.overrides import TorchFunctionMode

# They read a tensor on the host, or copy between host and device through memory that is not pinned; so does torch.where
# with a number.
READS = {
    "item", "tolist", "__bool__", "__int__", "__float__", "__index__", "__len__", "__iter__", "__contains__",
    "numpy", "__array__", "cpu", "cuda", "to", "nonzero", "masked_select", "unique",
    "equal", "allclose", "tensor", "as_tensor",
}  # fmt: skip
INDEXING = {"__getitem__", "__setitem__"}


class NoHostReads(TorchFunctionMode):
    """While it is on, such a call raises; kernels and staged copies, which a device would run, are let through."""

    def __init__(self) -> None:
        super().__init__()
        self._num_kernels = 0
        self.num_calls = 0  # that were looked at

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
        """`function`, as what a device runs."""

        def run(*args: Any, **kwargs: Any) -> Any:
            self._num_kernels += 1
            try:
                return function(*args, **kwargs)
            finally:
                self._num_kernels -= 1

        return run


class KernelOperations:
    """Operations each of which is a kernel."""

    def __init__(self, ops: object, guard: NoHostReads) -> None:
        self._ops = ops
        self._guard = guard

    def __getattr__(self, name: str) -> Callable[..., Any]:
        return self._guard.kernel(getattr(self._ops, name))


def _has_mask_or_list(index: Any) -> bool:
    parts = index if isinstance(index, tuple) else (index,)
    return any(isinstance(p, list) or (isinstance(p, torch.Tensor) and p.dtype == torch.bool) for p in parts)
