"""What a loaded engine holds."""

from __future__ import annotations

from dataclasses import dataclass

from engine.engine import Engine
from engine.model_status import MemoryProfile


@dataclass(frozen=True)
class EngineLoad:
    """Random weights made, memory measured, graphs captured."""

    seconds: float
    weights_bytes: int
    kv_bytes: int
    num_blocks: int  # of the KV pool
    captured_graphs: int
    failed_graphs: int  # batch sizes whose capture failed: their steps run eagerly or in a larger graph
    memory: MemoryProfile | None  # where a GPU's went at start; None on a CPU

    @classmethod
    def of(cls, engine: Engine, seconds: float) -> EngineLoad:
        """seconds: that loading it took."""
        status = engine.runner.status()
        graphs = status.decode_graphs
        return cls(
            seconds=seconds,
            weights_bytes=status.weights_bytes,
            kv_bytes=status.kv_bytes,
            num_blocks=status.num_blocks,
            captured_graphs=0 if graphs is None else len(graphs.captured_sizes),
            failed_graphs=0 if graphs is None else len(graphs.failed_sizes),
            memory=status.memory_profile,
        )

    def __str__(self) -> str:
        return (
            f"{self.seconds:.1f} s; weights {self.weights_bytes / 1e9:.2f} GB, KV {self.kv_bytes / 1e9:.2f} GB in "
            f"{self.num_blocks:,} blocks, {self.captured_graphs} graphs captured, {self.failed_graphs} not"
        )
