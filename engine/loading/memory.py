"""Asks how much memory is free: of the machine, of its container, of a GPU."""

from __future__ import annotations

from pathlib import Path
from typing import Protocol

import torch

from engine.errors import CapabilityError

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")

# PyTorch's allocator asks the driver for multiples of 2 MiB for tensors from 10 MiB on.
ROUNDING_BYTES = 2 << 20


def free_memory_bytes() -> int:
    """Bytes that an allocation could still get: MemAvailable of the machine or what the container's limit leaves,
    whichever is less. Raises CapabilityError where neither can be read.
    """
    available = meminfo_available_bytes(MEMINFO)
    headroom = cgroup_headroom_bytes(CGROUP)
    return available if headroom is None else min(available, headroom)


def meminfo_available_bytes(path: Path) -> int:
    """MemAvailable of a Linux meminfo file."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise CapabilityError(f"{path} cannot be read ({error}): set engine.kv_cache.num_blocks") from error
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise CapabilityError(f"{path} has no MemAvailable: set engine.kv_cache.num_blocks")


def cgroup_headroom_bytes(root: Path) -> int | None:
    """What the container's memory limit (cgroup v2) leaves; None where there is no limit.

    Pages of files count as free: the mapped weights lie there, and the kernel drops them before it refuses memory.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    reclaimable = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
    return None if limit == "max" else max(0, int(limit) - used + reclaimable)


def num_blocks_that_fit(budget_bytes: int, bytes_per_block: int, useful_blocks: int, settings: str) -> int:
    """Blocks for a budget, the null block included, and no more than can ever be of use.

    Raises CapabilityError, which says to raise `settings`, when not even one block besides the null block fits.
    """
    fit = budget_bytes // bytes_per_block
    if fit < 2:
        raise CapabilityError(
            f"the memory left for the KV cache is {max(0, budget_bytes)} bytes, two blocks need {2 * bytes_per_block}: "
            f"raise {settings}, or free memory"
        )
    return min(fit, useful_blocks + 1)


class DeviceMemory(Protocol):
    """The memory of a device that is not the machine's: how much there is, and the most that was taken."""

    @property
    def total_bytes(self) -> int:
        """What the device has."""
        ...

    @property
    def rounding_bytes(self) -> int:
        """What a large tensor may take beyond its own size."""
        ...

    def free_bytes(self) -> int:
        """What nobody holds now, other processes and this one's caches included."""
        ...

    def reset_peak(self) -> None:
        """Give cached memory back, and note the peak from here on."""
        ...

    def peak_bytes(self) -> int:
        """The most that this process held for tensors at once since `reset_peak`, what it held there included."""
        ...


class CudaDeviceMemory:
    """A GPU as the driver and PyTorch's allocator account for it.

    The peak is what the allocator reserved, not what tensors took of it: what lies between them, where steps of many
    shapes leave it in pieces, is as gone as the tensors are.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """What the GPU has."""
        _, total = torch.cuda.mem_get_info(self._device)
        return int(total)

    @property
    def rounding_bytes(self) -> int:
        """The allocator's."""
        return ROUNDING_BYTES

    def free_bytes(self) -> int:
        """What the driver could still give."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def reset_peak(self) -> None:
        """Wait for what runs, since its memory may still be in use, and begin anew."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """The most that was reserved since then."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))
