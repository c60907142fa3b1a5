"""What a loaded model can do, how it is doing, and where a GPU's memory goes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from engine.execution.forward import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.models.decoder import weights_bytes
from engine.models.placement import DTYPE_NAMES, supported_dtypes
from engine.stats import DecodeGraphStats
from settings import EngineSettings


class ModelReport:
    """Computes what a model can do and how it is doing from the model itself: no figure is a constant."""

    def __init__(
        self,
        executor: StepExecutor,
        block_manager: BlockManager,
        settings: EngineSettings,
        memory_profile: MemoryProfile | None,
    ) -> None:
        """memory_profile: measured at start; None on a CPU."""
        self._executor = executor
        self._blocks = block_manager
        self._settings = settings
        self._memory_profile = memory_profile

    def capabilities(self, max_sequence_tokens: int) -> ModelCapabilities:
        """What the model can do on this device. max_sequence_tokens: prompt and output together."""
        model = self._executor.model
        config, graphs = model.config, self._executor.graph_stats
        groups = {config.num_heads: "mha", 1: "mqa"}
        return ModelCapabilities(
            architecture=config.architecture,
            device=model.device.type,
            dtype=DTYPE_NAMES[model.dtype],
            dtypes=supported_dtypes(model.device),
            attention=groups.get(config.num_kv_heads, "gqa"),
            max_batch_size=self._settings.max_num_seqs,
            max_sequence_tokens=max_sequence_tokens,
            max_batched_tokens=self._settings.max_num_batched_tokens,
            kv_bytes_per_token=self._executor.kv_cache.spec.bytes_per_token,
            weights_bytes=weights_bytes(model),
            continuous_batching=True,
            chunked_prefill=True,
            unified_prefill=self._settings.unified_prefill,
            prefix_cache=self._blocks.prefix_caching,
            cuda_graphs=graphs is not None and bool(graphs.captured_sizes),
        )

    def status(self, *, failure: str | None) -> ModelStatus:
        """How the model is doing now. failure: why its engine broke; None: it did not."""
        kv_cache = self._executor.kv_cache
        return ModelStatus(
            state="ready" if failure is None else "failed",
            reason=failure,
            implementation=self._executor.model.device.type,
            num_forward_passes=self._executor.num_forward_passes,
            num_sequences=self._blocks.num_sequences,
            num_blocks=self._blocks.num_blocks,
            free_blocks=self._blocks.num_free_blocks,
            kv_bytes=kv_cache.spec.bytes_per_block * kv_cache.num_blocks,
            weights_bytes=weights_bytes(self._executor.model),
            decode_graphs=self._executor.graph_stats,
            memory_profile=self._memory_profile,
        )


@dataclass(frozen=True, slots=True)
class ModelCapabilities:
    """What a loaded model can do."""

    architecture: str
    device: str
    dtype: str
    dtypes: tuple[str, ...]  # that engine.dtype may ask for on this device
    attention: str  # "mha", "gqa" or "mqa"
    max_batch_size: int  # sequences
    max_sequence_tokens: int
    max_batched_tokens: int
    kv_bytes_per_token: int
    weights_bytes: int
    continuous_batching: bool
    chunked_prefill: bool
    unified_prefill: bool
    prefix_cache: bool
    cuda_graphs: bool


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
        """What remains for the KV pool; below 0 if the rest is more than may be used."""
        taken = self.weights_bytes + self.other_bytes + self.activations_bytes + self.graphs_bytes
        return self.usable_bytes - taken


@dataclass(frozen=True, slots=True)
class ModelStatus:
    """How a loaded model is doing."""

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
