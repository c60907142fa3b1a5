"""The stream of a device."""

from __future__ import annotations

import torch

from engine.execution.cpu_stream import CpuStream
from engine.execution.cuda_stream import CudaStream
from engine.execution.device_stream import DeviceStream


def make_device_stream(device: torch.device) -> DeviceStream:
    """The stream that work for `device` is launched into."""
    return CudaStream() if device.type == "cuda" else CpuStream()
