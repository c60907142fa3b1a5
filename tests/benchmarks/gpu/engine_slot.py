"""Room for one engine."""

from __future__ import annotations

import gc
from collections.abc import Callable
from contextlib import suppress

import torch

from engine.engine import Engine
from engine.errors import EngineError


class EngineSlot:
    """Loads an engine when it is first asked for, and gives its memory back: two models do not fit."""

    def __init__(self, load: Callable[[], Engine], device: torch.device) -> None:
        self._load = load
        self._device = device
        self._engine: Engine | None = None

    @property
    def is_empty(self) -> bool:
        """Whether `get` would load."""
        return self._engine is None

    def get(self) -> Engine:
        """The engine, loaded at the first call and at the first after `discard`."""
        if self._engine is None:
            self._engine = self._load()
        return self._engine

    def discard(self) -> None:
        """Drop it, whatever it was doing."""
        # After a fault of the device every call fails; the next section says so.
        with suppress(RuntimeError, EngineError):
            if self._engine is not None:
                self._engine.close()
        self._engine = None
        free_memory(self._device)


def free_memory(device: torch.device) -> None:
    """Of what nobody refers to; tiny models on a CPU need no room."""
    if device.type == "cuda":
        gc.collect()
        with suppress(RuntimeError):
            torch.cuda.empty_cache()
