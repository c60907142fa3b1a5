"""Which number formats the engine computes in, where."""

from __future__ import annotations

from types import MappingProxyType

import torch

DTYPES = MappingProxyType({"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16})
DTYPE_NAMES = MappingProxyType({dtype: name for name, dtype in DTYPES.items()})


def supported_dtypes(device: torch.device) -> tuple[str, ...]:
    """What engine.dtype may ask for.

    float16 is refused on a CPU: its matrix products run at 4 GFLOP/s there, against 436 in bfloat16 (kernels notes, 5).
    """
    return ("float32", "bfloat16", "float16") if device.type == "cuda" else ("float32", "bfloat16")
