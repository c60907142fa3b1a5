"""The memory of an NVIDIA GPU."""

from __future__ import annotations

import torch

# PyTorch's allocator asks the driver for multiples of 2 MiB for tensors from 10 MiB on.
ROUNDING_BYTES = 2 << 20


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
