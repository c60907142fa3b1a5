"""Sizes of a launch: the GPU it is for, what was measured to be best on it, and the tile of one program."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch
import triton
from triton.backends.driver import DriverBase
from triton.runtime import driver

INTERPRETED_CAPABILITY = 90  # the interpreter has no GPU to ask: launches take Hopper's parameters
DEFAULT_MULTIPROCESSORS = 132  # of an H200: where no GPU can be asked (interpreter, compilation ahead of time)


# By name of the GPU: what sweeps on it found (`python -m tests.benchmarks.gpu.first_contact` writes it). Without the
# file, and on GPUs that are not in it, the rules of the launch functions hold.
TUNED = Path(__file__).with_name("tuned.json")


def tuned(launch: str) -> Any:
    """What was measured to be best on this GPU for that launch, as its launch function reads it; None: nothing was."""
    return read_tuned().get(launch)


@lru_cache(maxsize=1)
def read_tuned(path: Path = TUNED) -> Mapping[str, Any]:
    """The launches tuned for this GPU; none where there is no GPU."""
    if not torch.cuda.is_available() or not path.exists():
        return {}
    found: Mapping[str, Any] = json.loads(path.read_text()).get(torch.cuda.get_device_name(), {})
    return found


def compute_capability() -> int:
    """Compute capability of the current target, such as 90; the interpreter counts as Hopper."""
    if triton.knobs.runtime.interpret:
        return INTERPRETED_CAPABILITY
    return _capability(driver.active, driver.active.get_current_device())


@lru_cache(maxsize=8)
def _capability(active: DriverBase, _device: int) -> int:
    """Asked once a device, not before each of the 144 launches of a step of 48 layers that need it."""
    return int(active.get_current_target().arch)


def num_multiprocessors(device: torch.device) -> int:
    """Streaming multiprocessors of the device."""
    if device.type != "cuda":
        return DEFAULT_MULTIPROCESSORS
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


@dataclass(frozen=True)
class TileLaunch:
    """The tile of one program, its sides powers of two, and the warps that work on it.

    What rows and columns are is up to the kernel; a tile over a vocabulary is one row of tokens.
    """

    rows: int
    columns: int
    num_warps: int
    num_stages: int = 1  # of a loop over tiles: all but one are on their way, each in shared memory


def power_of_two_from(value: int) -> int:
    """The smallest power of two that is at least `value` and at least 1."""
    return 1 << max(value - 1, 0).bit_length()
