"""Settings that nobody set and that follow from the model and the machine."""

from __future__ import annotations

import os
from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.model_config import ModelConfig
from engine.errors import CapabilityError, CheckpointError
from engine.kv_cache.kv_cache_spec import KVCacheSpec
from engine.loading.dtypes import DTYPES, supported_dtypes
from engine.loading.memory import free_memory_bytes, num_blocks_that_fit
from settings import EffectiveSettings


def derive_settings(effective: EffectiveSettings) -> EffectiveSettings:
    """Fill in what follows from the model and the machine: the one function behind `millrace config` and the engine.

    Raises CheckpointError (no model, or one that cannot run), CapabilityError (a setting this machine cannot honour).
    """
    path = model_path(effective)
    config = ModelConfig.from_directory(path)
    effective = effective.with_derived(
        {
            "model.name": path.resolve().name,
            "engine.device": "cuda" if torch.cuda.is_available() else "cpu",
            "engine.num_threads": len(os.sched_getaffinity(0)),
            "engine.max_model_len": config.max_position_embeddings,
        }
    )
    device = torch.device(effective.settings.engine.device)
    effective = effective.with_derived({"engine.dtype": _default_dtype(config.dtype, device)})
    _check_capabilities(effective, device)
    if effective.settings.engine.kv_cache.num_blocks is not None:
        return effective
    return effective.with_derived({"engine.kv_cache.num_blocks": _num_blocks(effective, config, device)})


def model_path(effective: EffectiveSettings) -> Path:
    """The checkpoint's directory. Raises CheckpointError where none is set."""
    path = effective.settings.model.path
    if path is None:
        raise CheckpointError("no model: set model.path (--model DIR)")
    return path


def kv_cache_spec(effective: EffectiveSettings, config: ModelConfig) -> KVCacheSpec:
    """Shape of the KV cache under fully derived settings."""
    settings = effective.settings.engine
    return KVCacheSpec(
        num_layers=config.num_layers,
        block_size=settings.kv_cache.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=DTYPES[settings.dtype],
    )


def max_model_len(effective: EffectiveSettings, config: ModelConfig) -> int:
    """Tokens of one request: engine.max_model_len, which never exceeds what the model was made for."""
    asked = effective.settings.engine.max_model_len
    return config.max_position_embeddings if asked is None else min(asked, config.max_position_embeddings)


def _default_dtype(checkpoint_dtype: str, device: torch.device) -> str:
    """The checkpoint's where the device computes in it at speed; elsewhere float32, which holds the others exactly."""
    if device.type == "cuda" or checkpoint_dtype == "float32":
        return checkpoint_dtype
    has_bf16 = bool(torch.ops.mkldnn._is_mkldnn_bf16_supported())
    return "bfloat16" if checkpoint_dtype == "bfloat16" and has_bf16 else "float32"


def _check_capabilities(effective: EffectiveSettings, device: torch.device) -> None:
    settings = effective.settings.engine
    if device.type == "cuda" and not torch.cuda.is_available():
        raise CapabilityError("engine.device=cuda: no CUDA device can be used here; accepted: cpu, auto")
    dtypes = supported_dtypes(device)
    if settings.dtype not in dtypes:
        raise CapabilityError(
            f"engine.dtype={settings.dtype}: not on {device.type}; accepted: auto, {', '.join(dtypes)}"
        )
    if settings.cuda_graphs.enabled:
        raise CapabilityError(
            f"engine.cuda_graphs.enabled=true: this build captures no graphs on {device.type}; accepted: false"
        )


def _num_blocks(effective: EffectiveSettings, config: ModelConfig, device: torch.device) -> int:
    settings = effective.settings.engine
    spec = kv_cache_spec(effective, config)
    with Checkpoint.open(model_path(effective)) as checkpoint:
        weights = checkpoint.total_bytes * spec.dtype.itemsize // DTYPES[config.dtype].itemsize
    budget = int((free_memory_bytes(device) - weights) * settings.kv_cache.memory_fraction)
    blocks_per_sequence = -(-max_model_len(effective, config) // spec.block_size)
    return num_blocks_that_fit(budget, spec.bytes_per_block, settings.max_num_seqs * blocks_per_sequence)
