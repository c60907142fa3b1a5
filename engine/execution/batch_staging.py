"""From a plan on the host to the tensors of a forward pass."""

from __future__ import annotations

import torch

from engine.execution.forward_batch import ForwardBatch
from engine.execution.planned_batch import PlannedBatch
from engine.execution.staging_buffer import StagingBuffer


class BatchStaging:
    """Brings plans to the device: as they lie on a CPU, in one copy from pinned memory on a GPU."""

    def __init__(self, device: torch.device) -> None:
        self._buffers = StagingBuffer.pair(device) if device.type == "cuda" else None

    def stage(self, planned: PlannedBatch) -> ForwardBatch:
        """The plan's batch. On a GPU its tensors last until the batch after the next one is staged."""
        arrays = planned.arrays
        if self._buffers is None:
            return planned.on_device([torch.from_numpy(array) for array in arrays])
        return planned.on_device(next(self._buffers).send(arrays))
