"""Settings that nobody set and that follow from the model and the machine."""

from __future__ import annotations

from pathlib import Path

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.model_directory import check_files_are_under_root, model_directory
from engine.checkpoint.read_config import read_config
from engine.errors import CapabilityError
from engine.kv_cache.kv_cache_spec import KVCacheSpec
from engine.loading.bfloat16_support import computes_bfloat16
from engine.loading.cpu_threads import usable_cores
from engine.loading.dtypes import DTYPES, supported_dtypes
from engine.loading.expected_weights import expected_weights_bytes
from engine.loading.memory import free_memory_bytes, num_blocks_that_fit
from kernels.dispatch import has_operations, int8_operations, operations
from kernels.errors import KernelsUnavailable
from settings import EffectiveSettings, EngineSettings

# Of 512 the prefill kernel would need 262,400 bytes of shared memory; an H100 has 232,448.
MAX_CUDA_HEAD_DIM = 256


def derive_settings(effective: EffectiveSettings) -> EffectiveSettings:
    """Fill in what follows from the model and the machine: the one function behind `millrace config` and the engine.

    Raises CheckpointError (no model, or one that cannot run), CapabilityError (a setting this machine cannot honour).
    """
    path = model_path(effective)
    config = read_config(path)
    effective = effective.with_derived(
        {
            "model.name": path.resolve().name,
            "engine.device": default_device(),
            "engine.num_threads": usable_cores(),
        }
    )
    device = torch.device(effective.settings.engine.device)
    is_deterministic = effective.settings.engine.deterministic
    effective = effective.with_derived(
        {
            "engine.dtype": _default_dtype(config.dtype, device),
            "engine.shared_prefix.enabled": device.type == "cpu" and not is_deterministic,
        }
    )
    _check_capabilities(effective, config, device)
    if isinstance(config, EncoderConfig):
        _check_encoder(effective.settings.engine)
        return effective.with_derived({"engine.max_model_len": config.default_max_len})
    if effective.settings.engine.kv_cache.num_blocks is None:
        num_blocks = _num_blocks(effective, config, device)
        effective = effective.with_derived({"engine.kv_cache.num_blocks": num_blocks})
    return _with_max_model_len(effective, config)


def model_path(effective: EffectiveSettings) -> Path:
    """The checkpoint's directory. Raises CheckpointError where none is set, or a link leads out of model.root;
    SettingsError where model.path does.
    """
    model = effective.settings.model
    directory = model_directory(model)
    check_files_are_under_root(directory, model)
    return directory


def default_device() -> str:
    """CUDA where there is a GPU that the kernels run on."""
    return "cuda" if has_operations(torch.device("cuda")) else "cpu"


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


def _default_dtype(checkpoint_dtype: str, device: torch.device) -> str:
    """The checkpoint's where the device computes in it at speed; elsewhere float32, which holds the others exactly."""
    if device.type == "cuda" or checkpoint_dtype == "float32":
        return checkpoint_dtype
    return "bfloat16" if checkpoint_dtype == "bfloat16" and computes_bfloat16() else "float32"


def _check_capabilities(
    effective: EffectiveSettings, config: ModelConfig | EncoderConfig, device: torch.device
) -> None:
    settings = effective.settings.engine
    try:
        operations(device)
    except KernelsUnavailable as error:
        raise CapabilityError(f"engine.device={device.type}: {error}") from error
    if device.type == "cuda" and isinstance(config, ModelConfig) and config.head_dim > MAX_CUDA_HEAD_DIM:
        raise CapabilityError(
            f"engine.device=cuda: head_dim is {config.head_dim}; accepted: up to {MAX_CUDA_HEAD_DIM}, "
            f"or engine.device=cpu"
        )
    if settings.deterministic:
        _check_deterministic(settings, device)
    if settings.quantization == "int8":
        _check_int8(settings, device)
    context = config.max_position_embeddings
    if settings.max_model_len is not None and settings.max_model_len > context:
        raise CapabilityError(
            f"engine.max_model_len={settings.max_model_len}: the model was made for {context} tokens; "
            f"accepted: 2 to {context}, none"
        )
    dtypes = supported_dtypes(device)
    if settings.dtype not in dtypes:
        raise CapabilityError(
            f"engine.dtype={settings.dtype}: not on {device.type}; accepted: auto, {', '.join(dtypes)}"
        )
    if settings.cuda_graphs.enabled:
        raise CapabilityError(
            f"engine.cuda_graphs.enabled=true: this build captures no graphs on {device.type}; accepted: false"
        )


def _check_encoder(settings: EngineSettings) -> None:
    if settings.deterministic:
        raise CapabilityError("engine.deterministic=true: not available for an encoder; accepted: false")
    if settings.quantization != "none":
        raise CapabilityError(
            f"engine.quantization={settings.quantization}: not available for an encoder; accepted: none"
        )


def _check_deterministic(settings: EngineSettings, device: torch.device) -> None:
    if device.type != "cpu":
        raise CapabilityError(
            f"engine.deterministic=true: not available on {device.type} in this build; accepted: false"
        )
    if settings.shared_prefix.enabled:
        raise CapabilityError(
            "engine.shared_prefix.enabled=true: not together with engine.deterministic=true, since the sums of a "
            "request would depend on which others share its prefix; accepted: none, false"
        )


def _check_int8(settings: EngineSettings, device: torch.device) -> None:
    if settings.deterministic:
        raise CapabilityError(
            "engine.quantization=int8: not together with engine.deterministic=true, whose products are not quantised; "
            "accepted: engine.quantization=none, or engine.deterministic=false"
        )
    try:
        int8_operations(device)
    except KernelsUnavailable as error:
        raise CapabilityError(f"engine.quantization=int8: {error}, or engine.quantization=none") from error


def _num_blocks(effective: EffectiveSettings, config: ModelConfig, device: torch.device) -> int:
    settings = effective.settings.engine
    spec = kv_cache_spec(effective, config)
    with Checkpoint.open(model_path(effective)) as checkpoint:
        weights = expected_weights_bytes(checkpoint, config, settings)
    budget = int((free_memory_bytes(device) - weights) * settings.kv_cache.memory_fraction)
    longest = settings.max_model_len or config.max_position_embeddings
    blocks_per_sequence = -(-longest // spec.block_size)
    return num_blocks_that_fit(budget, spec.bytes_per_block, settings.max_num_seqs * blocks_per_sequence)


def _with_max_model_len(effective: EffectiveSettings, config: ModelConfig) -> EffectiveSettings:
    """What one request may hold: the model's context, or the whole pool where that is less."""
    settings = effective.settings.engine
    blocks = settings.kv_cache.num_blocks or 0
    pool = (blocks - 1) * settings.kv_cache.block_size
    if settings.max_model_len is not None and settings.max_model_len > pool:
        raise CapabilityError(
            f"engine.max_model_len={settings.max_model_len}: the KV pool of {blocks} blocks holds {pool} tokens; "
            f"lower it, or raise engine.kv_cache.num_blocks or engine.kv_cache.memory_fraction"
        )
    return effective.with_derived({"engine.max_model_len": min(config.max_position_embeddings, pool)})
