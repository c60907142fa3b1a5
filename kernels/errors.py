"""What can go wrong before a kernel runs."""

from __future__ import annotations


class KernelsUnavailable(Exception):
    """No implementation of the operations exists for a device. There is no fallback: it would be a silent slowdown."""

    def __init__(self, device: str, reason: str) -> None:
        super().__init__(f"no kernels for device {device!r}: {reason}")
        self.device = device
        self.reason = reason
