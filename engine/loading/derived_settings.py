"""Fills in settings that follow from the model and the machine, and refuses those that they cannot honour."""

from __future__ import annotations

import math
import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path

import torch

from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.files import check_files_are_under_root, check_is_checkpoint, model_directory
from engine.checkpoint.model_config import ModelConfig, read_config
from engine.checkpoint.weights import Checkpoint
from engine.errors import CapabilityError
from engine.loading.kv_pool import DeviceMemory, derive_pool, device_memory, with_pool
from engine.models.placement import explain_native, supported_dtypes
from kernels.dispatch import (
    NATIVE_OFF,
    check_float8_cache,
    check_scheme,
    has_operations,
    int8_operations,
    operations,
)
from kernels.interface import KernelsUnavailable
from kernels.native.operations import native_operations
from settings import EffectiveSettings, EngineSettings, Source

# With 512 the prefill kernel would need 262,400 bytes of shared memory; an H100 has 232,448.
MAX_CUDA_HEAD_DIM = 256

MAX_SPECULATION_VOCAB = sys.maxunicode + 1  # tokens are looked up as the characters of a string

# GPUs: below, steps stay as small as a CPU's; from there on they have more sequences, since a step reads all weights
# once however many there are. An expert model's tokens a second grow almost with the sequences up to some 500 (an
# estimate: no GPU has measured it), which only the larger GPUs have KV for.
MIN_LARGE_STEP_BYTES = 16 << 30
MIN_LARGEST_STEP_BYTES = 100 << 30
MAX_NUM_SEQS, MAX_NUM_BATCHED_TOKENS = "engine.max_num_seqs", "engine.max_num_batched_tokens"

# Tokens of a step, times hidden size squared, up to which a host cannot launch layers as fast as a GPU runs them: of
# steps of 8,192 an H200 idled for 36 to 44 % with Qwen3-0.6B (1,024), for 1 and 2 % with 8B and 30B-A3B (4,096, 2,048).
MAX_CAPTURED_WORK = 1 << 33
CHUNK_TOKENS = "engine.cuda_graphs.chunk_tokens"

X86 = frozenset({"x86_64", "amd64"})

CPU_MAX = Path("/sys/fs/cgroup/cpu.max")


def derive_settings(effective: EffectiveSettings) -> EffectiveSettings:
    """Fill in what follows from the model of model.path and the machine: `millrace config` and the engine do so alike.

    Raises CheckpointError (no model, or one that cannot run), SettingsError (model.path leads out of model.root),
    CapabilityError (a setting this machine cannot honour).
    """
    path = model_path(effective)
    return derive_for(effective, path, read_config(path))


def derive_for(
    effective: EffectiveSettings,
    path: Path,
    config: ModelConfig | EncoderConfig,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint.open,
) -> EffectiveSettings:
    """`derive_settings` for the model at `path`, whose config.json says `config`."""
    effective = effective.with_derived(
        {
            "model.name": path.resolve().name,
            "engine.device": default_device(),
            "engine.num_threads": usable_cores(),
        }
    )
    device = torch.device(effective.settings.engine.device)
    is_deterministic = effective.settings.engine.deterministic
    captures = device.type == "cuda" and not is_deterministic and isinstance(config, ModelConfig)
    effective = effective.with_derived(
        {
            "engine.dtype": _default_dtype(config.dtype, device),
            "engine.shared_prefix.enabled": device.type == "cpu" and not is_deterministic,
            "engine.cuda_graphs.enabled": captures,
            "engine.native_kernels": explain_native(effective.settings.engine, device).variant,
            # Decoded one by one, each sequence is staged by itself, and the third waits for the first.
            "engine.async_scheduling": device.type == "cuda"
            and isinstance(config, ModelConfig)
            and effective.settings.engine.decode.batched
            and not effective.settings.engine.speculation.enabled,
        }
    )
    if isinstance(config, EncoderConfig):
        _check_encoder(effective.settings.engine)  # first: no machine makes a difference to it
    _check_capabilities(effective, config, device)
    memory = device_memory(device)
    effective = _with_captured_chunks(_with_step_limits(effective, memory), config.hidden_size)
    if isinstance(config, EncoderConfig):
        return effective.with_derived({"engine.max_model_len": config.default_max_len})
    if (num_blocks := effective.settings.engine.kv_cache.num_blocks) is not None:
        return with_pool(effective, config, num_blocks)
    with open_checkpoint(path) as checkpoint:
        return derive_pool(effective, checkpoint, config, memory)


def _with_step_limits(effective: EffectiveSettings, memory: DeviceMemory | None) -> EffectiveSettings:
    """Fill in how many sequences and tokens a step of a GPU has, each within what is set of the other."""
    if memory is None or memory.total_bytes < MIN_LARGE_STEP_BYTES:
        return effective
    settings = effective.settings.engine
    num_seqs, num_tokens = 512 if memory.total_bytes >= MIN_LARGEST_STEP_BYTES else 256, 8192
    if effective.source_of(MAX_NUM_BATCHED_TOKENS) is not Source.DEFAULT:
        num_seqs = min(num_seqs, settings.max_num_batched_tokens)
    if effective.source_of(MAX_NUM_SEQS) is not Source.DEFAULT:
        num_tokens = max(num_tokens, settings.max_num_seqs)
    return effective.with_derived({MAX_NUM_SEQS: num_seqs, MAX_NUM_BATCHED_TOKENS: num_tokens})


def _with_captured_chunks(effective: EffectiveSettings, hidden_size: int) -> EffectiveSettings:
    """Fill in up to how many tokens of chunks steps are captured, where that is more than by default."""
    settings = effective.settings.engine
    num_tokens = min(MAX_CAPTURED_WORK // hidden_size**2, settings.max_num_batched_tokens)
    if not settings.cuda_graphs.enabled or num_tokens <= settings.cuda_graphs.chunk_tokens:
        return effective
    return effective.with_derived({CHUNK_TOKENS: num_tokens})


def model_path(effective: EffectiveSettings) -> Path:
    """The checkpoint's directory. Raises CheckpointError where none is set, it is none, or a link leads out of
    model.root; SettingsError where model.path does.
    """
    model = effective.settings.model
    directory = model_directory(model)
    check_files_are_under_root(directory, model)
    check_is_checkpoint(directory, model.path or directory)
    return directory


def default_device() -> str:
    """CUDA where there is a GPU that the kernels run on."""
    return "cuda" if has_operations(torch.device("cuda")) else "cpu"


def _default_dtype(checkpoint_dtype: str, device: torch.device) -> str:
    """The checkpoint's dtype where the device is fast in it; elsewhere float32, which represents the others exactly."""
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
    _check_memory(effective, device)
    _check_quantised(settings, config, device)
    if settings.speculation.enabled:
        _check_speculation(settings, config)
    if settings.deterministic:
        _check_deterministic(settings, device)
    if settings.quantization != "none":
        _check_rounding(settings, device)
    if settings.native_kernels != NATIVE_OFF:
        _check_native(settings, device)
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
    _check_cache_dtype(settings, device)
    if settings.cuda_graphs.enabled and device.type != "cuda":
        raise CapabilityError(
            f"engine.cuda_graphs.enabled=true: {device.type} has no CUDA graphs; accepted: none, false"
        )


def _check_cache_dtype(settings: EngineSettings, device: torch.device) -> None:
    if settings.kv_cache.dtype == "auto":
        return
    try:
        check_float8_cache(device)
    except KernelsUnavailable as error:
        raise CapabilityError(f"engine.kv_cache.dtype=fp8: {error}, or auto") from error


def _check_memory(effective: EffectiveSettings, device: torch.device) -> None:
    """Refuse the setting that sizes the KV pool of the other kind of device: here it would mean nothing."""
    of_gpu, of_machine = "engine.gpu_memory_utilization", "engine.kv_cache.memory_fraction"
    meant, other = (of_gpu, of_machine) if device.type == "cuda" else (of_machine, of_gpu)
    if effective.source_of(other) is not Source.DEFAULT:
        row = next(row for row in effective.rows() if row.key == other)
        raise CapabilityError(f"{other}={row.value_text}: not on {device.type}; accepted: not set, or {meant} instead")


def _check_encoder(settings: EngineSettings) -> None:
    if settings.deterministic:
        raise CapabilityError("engine.deterministic=true: not available for an encoder; accepted: false")
    if settings.cuda_graphs.enabled:
        raise CapabilityError("engine.cuda_graphs.enabled=true: an encoder decodes nothing; accepted: none, false")
    if settings.async_scheduling:
        raise CapabilityError("engine.async_scheduling=true: not available for an encoder; accepted: none, false")
    if settings.quantization != "none":
        raise CapabilityError(
            f"engine.quantization={settings.quantization}: not available for an encoder; accepted: none"
        )
    if settings.kv_cache.dtype != "auto":
        raise CapabilityError(
            f"engine.kv_cache.dtype={settings.kv_cache.dtype}: not available for an encoder; accepted: auto"
        )


def _check_speculation(settings: EngineSettings, config: ModelConfig | EncoderConfig) -> None:
    if isinstance(config, EncoderConfig):
        raise CapabilityError("engine.speculation.enabled=true: an encoder decodes nothing; accepted: false")
    if settings.async_scheduling:
        raise CapabilityError(
            "engine.speculation.enabled=true: not together with engine.async_scheduling=true, since a draft begins "
            "with the answer of the step before; accepted: false, or engine.async_scheduling=none"
        )
    if config.vocab_size > MAX_SPECULATION_VOCAB:
        raise CapabilityError(
            f"engine.speculation.enabled=true: the vocabulary has {config.vocab_size} ids; accepted: up to "
            f"{MAX_SPECULATION_VOCAB}"
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


def _check_rounding(settings: EngineSettings, device: torch.device) -> None:
    if settings.quantization == "int4":
        return
    if settings.deterministic:
        raise CapabilityError(
            "engine.quantization=int8: not together with engine.deterministic=true, whose products are not quantised; "
            "accepted: engine.quantization=none, or engine.deterministic=false"
        )
    try:
        int8_operations(device)
    except KernelsUnavailable as error:
        raise CapabilityError(f"engine.quantization=int8: {error}, or engine.quantization=none") from error


def _check_quantised(settings: EngineSettings, config: ModelConfig | EncoderConfig, device: torch.device) -> None:
    quantization = None if isinstance(config, EncoderConfig) else config.quantization
    if quantization is None:
        return
    try:
        for group in quantization.groups:
            check_scheme(device, group.stored.scheme)
    except KernelsUnavailable as error:
        raise CapabilityError(f"engine.device={device.type}: the weights of the checkpoint: {error}") from error
    if settings.quantization != "none":
        raise CapabilityError(
            f"engine.quantization={settings.quantization}: the weights of the checkpoint are quantised already "
            f"({quantization}); accepted: none"
        )


def _check_native(settings: EngineSettings, device: torch.device) -> None:
    asked = f"engine.native_kernels={settings.native_kernels}"
    if device.type != "cpu":
        raise CapabilityError(f"{asked}: native kernels are for CPUs, not for {device.type}; accepted: auto, off")
    if settings.deterministic or settings.quantization == "int8":
        other = "engine.deterministic=true" if settings.deterministic else "engine.quantization=int8"
        raise CapabilityError(f"{asked}: not together with {other}, which has kernels of its own; accepted: auto, off")
    try:
        native_operations(settings.native_kernels)
    except KernelsUnavailable as error:
        raise CapabilityError(f"{asked}: {error}") from error


def computes_bfloat16() -> bool:
    """Whether bfloat16 products are instructions of this CPU.

    On x86 `_is_mkldnn_bf16_supported` asks for AVX-512 alone, and oneDNN then emulates them: 40 GFLOP/s against 150 to
    230 in float32 (2 cores of a Cascade Lake). Elsewhere it asks for the instructions themselves.
    """
    if not torch.ops.mkldnn._is_mkldnn_bf16_supported():
        return False
    if platform.machine().lower() not in X86:
        return True
    return bool(torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported())


def usable_cores(cpu_max: Path = CPU_MAX) -> int:
    """Cores this process may run on, or the container's CPU quota (cgroup v2) rounded up, whichever is less."""
    allowed = len(os.sched_getaffinity(0))
    try:
        quota, period = cpu_max.read_text().split()
    except FileNotFoundError:
        return allowed
    return allowed if quota == "max" else max(1, min(allowed, math.ceil(int(quota) / int(period))))
