"""How a loaded model is doing."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.execution.decode_graph_stats import DecodeGraphStats
from engine.loading.memory_profile import MemoryProfile


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
    decode_graphs: DecodeGraphStats | None  # None where decode steps are not captured
    memory_profile: MemoryProfile | None  # where a GPU's memory went at start; None on a CPU
