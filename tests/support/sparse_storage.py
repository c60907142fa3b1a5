"""More elements than an int32 can count, on a machine with little memory."""

from __future__ import annotations

from pathlib import Path

import torch

PAST_INT32_ELEMENTS = 2**31 + 2**16


def past_int32_storage(directory: Path, device: torch.device) -> torch.Tensor:
    """A flat float16 tensor of 2^31 + 2^16 zeros: on a CPU a sparse file, of which only touched pages exist."""
    if device.type != "cpu":
        return torch.zeros(PAST_INT32_ELEMENTS, dtype=torch.float16, device=device)
    return torch.from_file(str(directory / "sparse"), shared=True, size=PAST_INT32_ELEMENTS, dtype=torch.float16)
