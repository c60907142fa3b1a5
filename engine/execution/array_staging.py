"""Arrays of the host on their way to the device."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy.typing as npt
import torch

from engine.execution.staging_buffer import StagingBuffer


class ArrayStaging:
    """Brings a step's arrays to the device: as they lie on a CPU, in one copy from pinned memory on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = StagingBuffer.pair(device) if device.type == "cuda" else None

    def send(self, arrays: Sequence[npt.NDArray[Any]]) -> list[torch.Tensor]:
        """Their tensors. On a GPU these last until the call after the next one; nothing is waited for."""
        if self._buffers is None:
            return [torch.from_numpy(array) for array in arrays]
        return next(self._buffers).send(arrays) if arrays else []
