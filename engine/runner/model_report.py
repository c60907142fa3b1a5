"""Reads capabilities and status off a loaded model."""

from __future__ import annotations

from engine.execution.step_executor import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.loading.dtypes import DTYPE_NAMES, supported_dtypes
from engine.loading.memory_profile import MemoryProfile
from engine.models.weights_bytes import weights_bytes
from engine.runner.model_capabilities import ModelCapabilities
from engine.runner.model_status import ModelStatus
from settings import EngineSettings


class ModelReport:
    """Computed figures, none of them constant (seeds E11, E12)."""

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
        """What the model can do on this device. max_sequence_tokens: of one sequence, prompt and output together."""
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
