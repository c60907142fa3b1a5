"""What the figures were measured on, and what it can do at best."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch
import triton

from tests.benchmarks.checkout import Checkout, command_output

COPY_BYTES = 2**30
MATMUL_SIZE = 8192


class _Timer(Protocol):
    def median_us(self, run: Callable[[], object]) -> float: ...


@dataclass(frozen=True)
class Machine:
    """A GPU, the software on it, and its measured limits."""

    gpu: str
    driver: str
    cuda: str
    torch: str
    triton: str
    checkout: Checkout
    copy_bytes_per_s: float  # read and written, together
    matmul_flop_per_s: float  # bfloat16
    event_floor_us: float  # what a run of nothing takes: part of every time below


def measure_machine(timer: _Timer, device: torch.device) -> Machine:
    """Read the versions and measure the limits."""
    source = torch.empty(COPY_BYTES, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    copy_us = timer.median_us(lambda: target.copy_(source))
    left, right = (torch.randn(MATMUL_SIZE, MATMUL_SIZE, device=device).bfloat16() for _ in range(2))
    matmul_us = timer.median_us(lambda: left @ right)
    return Machine(
        gpu=torch.cuda.get_device_name(device),
        driver=command_output(["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]) or "unknown",
        cuda=torch.version.cuda or "unknown",
        torch=torch.__version__,
        triton=triton.__version__,
        checkout=Checkout.read(),
        copy_bytes_per_s=2 * COPY_BYTES / (copy_us / 1e6),
        matmul_flop_per_s=2 * MATMUL_SIZE**3 / (matmul_us / 1e6),
        event_floor_us=timer.median_us(lambda: None),
    )
