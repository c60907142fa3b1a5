"""What the host waits for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

import torch

HostCopy = Callable[[], Sequence[torch.Tensor]]  # waits for the copy, then gives it; to be called once


class DeviceStream(Protocol):
    """The queue of work that forward passes and sampling are launched into: the current stream of a GPU.

    Everything that a step answers goes through here, and nothing else may wait for the device.
    """

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """Queue one copy of all of these to the host, behind what has been launched. Does not wait."""
        ...
