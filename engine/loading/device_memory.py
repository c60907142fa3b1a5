"""What is asked of a device's memory."""

from __future__ import annotations

from typing import Protocol


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
