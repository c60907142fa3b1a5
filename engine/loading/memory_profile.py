"""Where a GPU's memory goes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryProfile:
    """Where a GPU's memory goes, measured before the KV pool is made. All in bytes."""

    total_bytes: int
    usable_bytes: int  # engine.gpu_memory_utilization of the total
    weights_bytes: int
    # Other processes, the CUDA context, the code of kernels, workspaces of libraries, and what the pool's tensors are
    # rounded up by.
    other_bytes: int
    activations_bytes: int  # the most that a step takes beside weights and KV
    graphs_bytes: int  # decode graphs with their buffers

    @property
    def kv_bytes(self) -> int:
        """What remains for the KV pool; below 0 where the rest alone is more than what may be used."""
        held = self.weights_bytes + self.other_bytes + self.activations_bytes + self.graphs_bytes
        return self.usable_bytes - held
