"""A device stream that writes down what the host asks of it."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.staging import HostCopy, pack, unpack


class RecordingStream:
    """Copies through one buffer, as to a GPU's host, and notes `copy N` when one is queued, `wait N` when it is read.

    The bytes are those of the moment a copy was queued: what the host overwrites later is not seen.
    """

    def __init__(self) -> None:
        self.events: list[str] = []
        self.num_copies = 0

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        number, self.num_copies = self.num_copies, self.num_copies + 1
        packed = pack(tensors).clone()
        self.events.append(f"copy {number}")

        def wait() -> Sequence[torch.Tensor]:
            self.events.append(f"wait {number}")
            return unpack(packed, tensors)

        return wait
