"""From settings to a loaded, warmed-up model with its KV cache."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path

import structlog
import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.checkpoint.generation_config import read_generation_config
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CheckpointError, EngineFatal
from engine.execution.pass_trace import PassTrace
from engine.execution.step_executor import StepExecutor
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.loading.choose_operations import choose_operations
from engine.loading.derived_settings import derive_settings, kv_cache_spec, model_path
from engine.loading.dtypes import DTYPES
from engine.loading.engine_parts import EngineParts
from engine.loading.matmul_precision import require_float32_sums
from engine.loading.quantization_error import measure_quantization_error
from engine.models.load_decoder import load_decoder
from engine.models.model_placement import ModelPlacement
from engine.runner.model_runner import ModelRunner
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings

_log = structlog.get_logger(__name__)


def load_parts(effective: EffectiveSettings, pass_trace: PassTrace | None = None) -> EngineParts:
    """Load everything an engine needs: pools, hash table and weights are made here and live as long as the engine.

    Forward passes that engine.profile selects go into `pass_trace`, the warm-up's too.
    """
    effective = derive_settings(effective)
    settings = effective.settings.engine
    path = model_path(effective)
    config = ModelConfig.from_directory(path)
    device = torch.device(settings.device)
    num_blocks, max_model_len = settings.kv_cache.num_blocks, settings.max_model_len
    if num_blocks is None or max_model_len is None or settings.num_threads is None:
        raise EngineFatal("derive_settings left engine.num_threads, max_model_len or kv_cache.num_blocks unset")
    torch.set_num_threads(settings.num_threads)
    require_float32_sums()
    placement = ModelPlacement(
        device=device,
        dtype=DTYPES[settings.dtype],
        ops=choose_operations(settings, device),
        max_positions=max_model_len,
        bucketed_min_tokens=settings.moe.bucketed_min_tokens if settings.moe.bucketed else None,
    )
    with Checkpoint.open(path) as checkpoint:
        model = load_decoder(config, checkpoint, placement)
        if settings.quantization != "none" and model.lm_head is not None:  # what is compared is logits
            error = measure_quantization_error(model, config, checkpoint, placement, kv_cache_spec(effective, config))
            _log.info("quantization_error", quantization=settings.quantization, **asdict(error))
    kv_cache = KVCacheTensors.allocate(kv_cache_spec(effective, config), num_blocks, device)
    executor = StepExecutor(model, kv_cache, settings, pass_trace)
    block_manager = BlockManager(num_blocks, settings.kv_cache.block_size, prefix_caching=settings.prefix_cache.enabled)
    runner = ModelRunner(executor, block_manager, settings, max_model_len)
    runner.warm_up()
    return EngineParts(
        effective=effective,
        executor=executor,
        runner=runner,
        block_manager=block_manager,
        tokenizer=Tokenizer.from_directory(path),
        eos_token_ids=_eos_token_ids(path, config),
        embedding=EmbeddingConfig.from_directory(path, size=config.hidden_size, default="last_token"),
    )


def _eos_token_ids(path: Path, config: ModelConfig) -> frozenset[int]:
    ids = read_generation_config(path).eos_token_ids
    beyond = sorted(token_id for token_id in ids if not 0 <= token_id < config.vocab_size)
    if beyond:
        raise CheckpointError(
            f"eos_token_id {beyond[0]} is outside the vocabulary; accepted: 0 to {config.vocab_size - 1}"
        )
    return ids
