"""How a loaded model is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How a loaded model is doing, read off the pool and the counters at the time of the call."""

    state: Literal["ready", "failed"]
    reason: str | None  # why it failed
    implementation: str  # which kernels run, e.g. "cpu"
    num_forward_passes: int  # the warm-up included
    num_sequences: int  # that hold blocks, through this interface or the engine
    num_blocks: int
    free_blocks: int
    kv_bytes: int  # of the whole pool
    weights_bytes: int
