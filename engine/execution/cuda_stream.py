"""The current stream of a GPU."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from engine.execution.device_stream import HostCopy
from engine.execution.packed_tensors import pack, unpack


class CudaStream:
    """Copies into pinned memory, which PyTorch keeps and hands out again once a copy into it is over.

    An event, not the stream, is waited for: the next step is queued behind it by then.
    """

    def copy_back(self, tensors: Sequence[torch.Tensor]) -> HostCopy:
        """See `DeviceStream.copy_back`."""
        packed = pack(tensors)
        on_host = torch.empty(packed.shape, dtype=torch.uint8, pin_memory=True)
        on_host.copy_(packed, non_blocking=True)
        copied = torch.cuda.Event()  # type: ignore[no-untyped-call]  # of torch
        copied.record()

        def wait() -> Sequence[torch.Tensor]:
            copied.synchronize()
            return unpack(on_host, tensors)

        return wait
