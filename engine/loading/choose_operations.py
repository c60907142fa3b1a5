"""Which implementation of the operations an engine computes with."""

from __future__ import annotations

import torch

from kernels.dispatch import deterministic_operations, int8_operations, operations
from kernels.interface import Operations
from settings import EngineSettings


def choose_operations(settings: EngineSettings, device: torch.device) -> Operations:
    """What the settings ask for on this device. Raises KernelsUnavailable where there is no such thing."""
    if settings.quantization == "int8":
        return int8_operations(device)
    return deterministic_operations(device) if settings.deterministic else operations(device)
