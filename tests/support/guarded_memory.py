"""Fresh memory as hostile as it can be: full of NaN, with guards on both sides."""

from __future__ import annotations

from typing import Any

import pytest
import torch

_GUARD_ELEMENTS = 4096  # more than a tile of any kernel reaches past a row's end; a multiple of 16 bytes
_GUARD = 77


class GuardedMemory:
    """Hands out what torch.empty, torch.empty_like and Tensor.new_empty give while it is installed.

    Floats start as NaN, integers as the lowest value, so that what a kernel leaves out shows; `check` finds what it
    wrote where nothing was its own, which the sequential interpreter would let pass.
    """

    def __init__(self) -> None:
        self._empty = torch.empty
        self._buffers: list[tuple[torch.Tensor, int]] = []

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """Until monkeypatch undoes it."""

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
