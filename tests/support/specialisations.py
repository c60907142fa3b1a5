"""Which kernels a GPU would have to compile: launches are specialised as there, and neither compiled nor run."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from typing import Any
from unittest import mock

import torch
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from tests.support.compiled_kernels import _Driver

_NUMBERS = count(1)


class _Specialising(_Driver):
    """A device that no other test has: Triton keeps what is compiled for each."""

    def __init__(self, capability: int) -> None:
        super().__init__(capability)
        self._name = f"specialising {next(_NUMBERS)}"

    def get_current_device(self) -> Any:
        return self._name


@contextmanager
def recorded_specialisations(capability: int) -> Iterator[list[str]]:
    """Names of kernels with their keys, one for each compilation that a GPU would see, in their order.

    What kernels would write is zeros.
    """
    recorded: list[str] = []
    run = JITFunction.run

    def never_launch(self: Any, *args: Any, grid: Any, warmup: bool, **kwargs: Any) -> Any:
        return run(self, *args, grid=grid, warmup=True, **kwargs)

    def never_compile(self: Any, key: Any, signature: Any, device: Any, *_: Any) -> object:
        recorded.append(f"{self.fn.__name__} {key}")
        kernel = object()
        self.device_caches[device][0][key] = kernel
        return kernel

    with (
        mock.patch.object(driver, "_active", _Specialising(capability)),
        mock.patch.object(JITFunction, "run", never_launch),
        mock.patch.object(JITFunction, "_do_compile", never_compile),
        mock.patch.object(torch, "empty", torch.zeros),
        mock.patch.object(torch, "empty_like", torch.zeros_like),
    ):
        yield recorded
