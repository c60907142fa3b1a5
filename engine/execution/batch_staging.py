"""From a plan on the host to the tensors of a forward pass."""

from __future__ import annotations

import torch

from engine.execution.array_staging import ArrayStaging
from engine.execution.forward_batch import ForwardBatch
from engine.execution.planned_batch import PlannedBatch


class BatchStaging:
    """Brings plans to the device."""

    def __init__(self, device: torch.device) -> None:
        self._arrays = ArrayStaging(device)

    def stage(self, planned: PlannedBatch) -> ForwardBatch:
        """The plan's batch. On a GPU its tensors last until the batch after the next one is staged."""
        return planned.on_device(self._arrays.send(planned.arrays))
