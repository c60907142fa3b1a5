"""What `millrace doctor` asks torch, the kernels and the model. Imported only where torch is installed."""

from __future__ import annotations

import importlib.metadata
from collections.abc import Iterator

import torch

from engine.checkpoint.checkpoint import Checkpoint
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.read_config import read_config
from engine.errors import EngineError
from engine.loading.choose_operations import choose_operations
from engine.loading.derived_settings import default_device, derive_settings, model_path
from engine.text.tokenizer import Tokenizer
from kernels.dispatch import implementation_names, operations
from kernels.errors import KernelsUnavailable
from settings import EffectiveSettings, SettingsError, Source
from worker.cli.finding import Finding
from worker.cli.install_hint import INSTALL_ENGINE
from worker.cli.level import Level


def engine_findings(effective: EffectiveSettings) -> Iterator[Finding]:
    """torch and triton, the device, its kernels, and whether the model can be read."""
    yield Finding("torch", Level.OK, torch.__version__)
    yield _triton()
    device = _device(effective)
    yield _device_finding(effective, device)
    yield from _kernels(effective, device)
    if device.type == "cpu" and torch.cuda.is_available():
        yield _unused_gpu(effective)
    yield from _model(effective)


def _device(effective: EffectiveSettings) -> torch.device:
    wanted = effective.settings.engine.device
    return torch.device(default_device() if wanted == "auto" else wanted)


def _triton() -> Finding:
    try:
        return Finding("triton", Level.OK, importlib.metadata.version("triton"))
    except importlib.metadata.PackageNotFoundError:
        level = Level.FAILED if torch.cuda.is_available() else Level.OK
        fix = INSTALL_ENGINE if level is Level.FAILED else None
        return Finding("triton", level, "not installed (it is needed on CUDA only)", fix)


def _device_finding(effective: EffectiveSettings, device: torch.device) -> Finding:
    asked = f"engine.device={effective.settings.engine.device}"
    if device.type == "cpu":
        return Finding("device", Level.OK, f"cpu, {torch.get_num_threads()} threads ({asked})")
    if not torch.cuda.is_available():
        fix = "install the NVIDIA driver and a CUDA build of torch, or set engine.device=cpu"
        return Finding("device", Level.FAILED, f"{asked}, but torch sees no CUDA device", fix)
    free, total = torch.cuda.mem_get_info(device)
    name = torch.cuda.get_device_name(device)
    return Finding("device", Level.OK, f"{name}, {free / 2**30:.1f} of {total / 2**30:.1f} GiB free ({asked})")


def _unused_gpu(effective: EffectiveSettings) -> Finding:
    try:
        operations(torch.device("cuda"))
    except KernelsUnavailable as error:
        return Finding("gpu", Level.WARNING, f"not used: {error}", "run on a GPU the kernels support")
    fix = "set engine.device=auto to use it"
    return Finding("gpu", Level.WARNING, f"not used: engine.device={effective.settings.engine.device}", fix)


def _kernels(effective: EffectiveSettings, device: torch.device) -> Iterator[Finding]:
    try:
        names = implementation_names(choose_operations(effective.settings.engine, device), device)
    except KernelsUnavailable as error:
        yield Finding("kernels", Level.FAILED, str(error), "set engine.device=cpu")
        return
    by_implementation: dict[str, list[str]] = {}
    for operation, implementation in names.items():
        by_implementation.setdefault(implementation, []).append(operation)
    for implementation, its_operations in by_implementation.items():
        yield Finding("kernels", Level.OK, f"{implementation}: {', '.join(its_operations)}")


def _model(effective: EffectiveSettings) -> Iterator[Finding]:
    if effective.settings.model.path is None:
        fix = "set model.path (MILLRACE_MODEL__PATH, --model DIR) where a worker is to run"
        yield Finding("model", Level.WARNING, "model.path is not set", fix)
        return
    try:
        path = model_path(effective)
        config = read_config(path)
        is_encoder = isinstance(config, EncoderConfig)
        with Checkpoint.open(path) as checkpoint:
            size_bytes = checkpoint.total_bytes
        tokenizer = Tokenizer.for_encoding(path) if is_encoder else Tokenizer.from_directory(path)
        derived = derive_settings(effective)
    except (EngineError, SettingsError) as error:
        yield Finding("model", Level.FAILED, str(error), "give the directory of a supported checkpoint")
        return
    yield Finding("model", Level.OK, f"{path}: {config.architecture}, {size_bytes / 2**30:.2f} GiB of weights")
    if is_encoder:
        yield Finding("endpoints", Level.OK, "an encoder: /v1/embeddings only")
        return
    yield Finding("kv cache", Level.OK, _kv_cache(derived))
    if tokenizer.chat_template is None:
        fix = "add chat_template.jinja to the checkpoint, or send prompts only"
        yield Finding("chat template", Level.WARNING, "none: lines with messages will be refused", fix)
    else:
        yield Finding("chat template", Level.OK, "found")


def _kv_cache(derived: EffectiveSettings) -> str:
    engine = derived.settings.engine
    size = f"{engine.kv_cache.num_blocks} blocks of {engine.kv_cache.block_size} tokens in {engine.dtype}"
    if derived.source_of("engine.kv_cache.num_blocks") is not Source.ESTIMATED:
        return size
    leaves = f"engine.gpu_memory_utilization={engine.gpu_memory_utilization} leaves"
    return f"{size}, estimated: a worker measures what {leaves}"
