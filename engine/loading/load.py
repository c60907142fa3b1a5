"""Loads the engine for a checkpoint: derives settings, loads the model, sizes the KV pool, warms up."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

from engine.checkpoint.embedding_config import read_pooling
from engine.checkpoint.encoder_config import EncoderConfig
from engine.checkpoint.model_config import ModelConfig, read_config, read_eos_token_ids
from engine.checkpoint.weights import Checkpoint
from engine.encoder import EncoderEngine, EncoderParts
from engine.engine import Engine
from engine.errors import EngineFatal
from engine.execution.decode_graphs import make_decode_graphs
from engine.execution.forward import EncoderExecutor, StepExecutor
from engine.execution.profile import PassTrace
from engine.generation import EngineParts
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.tensors import KVCacheTensors
from engine.loading.derived_settings import derive_for, model_path
from engine.loading.kv_pool import (
    NUM_BLOCKS,
    device_memory,
    expected_step_bytes,
    expected_weights_bytes,
    kv_cache_spec,
    longest_row,
    with_measured_pool,
)
from engine.loading.warm_up import log_memory_profile, measure_memory
from engine.model_interface import ModelInterface
from engine.model_status import MemoryProfile
from engine.models.decoder import DecoderModel
from engine.models.load import load_decoder
from engine.models.load_encoder import load_encoder
from engine.models.placement import prepare_placement
from engine.out_of_memory import POOL_SETTINGS, WEIGHTS_ADVICE, naming_settings
from engine.text.tokenizer import Tokenizer
from settings import EffectiveSettings, Source

GRAPH_ADVICE = "lower engine.gpu_memory_utilization, engine.kv_cache.num_blocks or engine.max_num_seqs"


def load_engine(effective: EffectiveSettings, pass_trace: PassTrace | None = None) -> Engine | EncoderEngine:
    """Derive what is not set, load the model of model.path, warm it up.

    Forward passes that engine.profile selects go into `pass_trace`. Raises CheckpointError, SettingsError (model.path
    leads out of model.root), CapabilityError (a setting this device, build or kind of model cannot honour),
    NonFiniteLogits.
    """
    path = model_path(effective)
    config = read_config(path)
    effective = derive_for(effective, path, config)
    engine: Engine | EncoderEngine
    if isinstance(config, EncoderConfig):
        engine = EncoderEngine(load_encoder_parts(effective, path, config, pass_trace))
    else:
        engine = Engine(load_decoder_parts(effective, path, config, pass_trace))
    give_back_freed_memory()
    return engine


def give_back_freed_memory() -> None:
    """Let the system have what was freed; nothing where the C library is not glibc.

    Weights are packed into memory of their own, and glibc keeps what they were packed from for later: 78 MiB after a
    model of 159 M parameters in bfloat16 was loaded.
    """
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
    if trim is not None:
        trim(0)


def load_decoder_parts(
    effective: EffectiveSettings,
    path: Path,
    config: ModelConfig,
    pass_trace: PassTrace | None = None,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint.open,
) -> EngineParts:
    """Load everything a decoder's engine needs, and warm up. effective: fully derived.

    Forward passes that engine.profile selects go into `pass_trace`, the warm-up's too. On a GPU kernels are compiled
    and memory is measured first, and an estimated pool is replaced. Raises CheckpointError, NonFiniteLogits,
    CapabilityError (memory ran out).
    """
    settings = effective.settings.engine
    if settings.kv_cache.num_blocks is None or settings.max_model_len is None:
        raise EngineFatal("derive_settings left engine.max_model_len or kv_cache.num_blocks unset")
    with open_checkpoint(path) as checkpoint:
        model = _load_model(effective, config, checkpoint)
    effective, profile = _measured(effective, config, model)
    executor = _make_executor(effective, config, model, pass_trace)
    settings, max_model_len = effective.settings.engine, effective.settings.engine.max_model_len or 0
    block_manager = BlockManager(
        executor.kv_cache.num_blocks,
        settings.kv_cache.block_size,
        prefix_caching=settings.prefix_cache.enabled,
        kept_tokens=config.kept_tokens,
    )
    model_interface = ModelInterface(executor, block_manager, settings, max_model_len, profile)
    with naming_settings("the decode graphs and a first step", expected_step_bytes(config, settings), GRAPH_ADVICE):
        model_interface.warm_up()
    return EngineParts(
        effective=effective,
        executor=executor,
        model_interface=model_interface,
        block_manager=block_manager,
        tokenizer=Tokenizer.from_directory(path),
        eos_token_ids=read_eos_token_ids(path, config.vocab_size),
        embedding=read_pooling(path, config),
    )


def _load_model(effective: EffectiveSettings, config: ModelConfig, checkpoint: Checkpoint) -> DecoderModel:
    settings = effective.settings.engine
    placement = prepare_placement(settings, max_positions=longest_row(effective, config))
    num_bytes = expected_weights_bytes(checkpoint, config, settings)
    with naming_settings("the weights", num_bytes, WEIGHTS_ADVICE):
        return load_decoder(config, checkpoint, placement)


def _measured(
    effective: EffectiveSettings, config: ModelConfig, model: DecoderModel
) -> tuple[EffectiveSettings, MemoryProfile | None]:
    """The settings with the pool that fits, unless somebody set one, and where the memory goes; None on a CPU."""
    memory = device_memory(model.device)
    if memory is None:
        return effective, None
    settings, spec = effective.settings.engine, kv_cache_spec(effective, config)
    longest = longest_row(effective, config)
    profile = measure_memory(
        model, spec, settings, longest, memory, lambda cache: make_decode_graphs(model, cache, settings, longest)
    )
    if effective.source_of(NUM_BLOCKS) is Source.ESTIMATED:
        effective = with_measured_pool(effective, config, profile)
    log_memory_profile(profile, spec, effective.settings.engine)
    return effective, profile


def _make_executor(
    effective: EffectiveSettings, config: ModelConfig, model: DecoderModel, pass_trace: PassTrace | None
) -> StepExecutor:
    """The executor with its KV pool, and with graphs that are not captured yet."""
    settings, spec = effective.settings.engine, kv_cache_spec(effective, config)
    num_blocks, max_model_len = settings.kv_cache.num_blocks or 0, settings.max_model_len or 0
    with naming_settings("the KV pool", num_blocks * spec.bytes_per_block, f"lower {POOL_SETTINGS[model.device.type]}"):
        kv_cache = KVCacheTensors.allocate(spec, num_blocks, model.device)
    with naming_settings("the decode graphs", expected_step_bytes(config, settings), GRAPH_ADVICE):
        graphs = make_decode_graphs(model, kv_cache, settings, max_model_len)
    return StepExecutor(model, kv_cache, settings, pass_trace, graphs)


def load_encoder_parts(
    effective: EffectiveSettings, path: Path, config: EncoderConfig, pass_trace: PassTrace | None
) -> EncoderParts:
    """Load everything an encoder's engine needs, and warm up. effective: fully derived.

    Forward passes that engine.profile selects go into `pass_trace`, the warm-up's too. Raises CheckpointError,
    NonFiniteLogits, CapabilityError (memory ran out).
    """
    settings = effective.settings.engine
    if settings.max_model_len is None:
        raise EngineFatal("derive_settings left engine.max_model_len unset")
    placement = prepare_placement(settings, max_positions=config.max_position_embeddings)
    with Checkpoint.open(path) as checkpoint, naming_settings("the weights", checkpoint.total_bytes, WEIGHTS_ADVICE):
        model = load_encoder(config, checkpoint, placement)
    executor = EncoderExecutor(model, settings, pass_trace)
    executor.warm_up()
    return EncoderParts(
        effective=effective,
        executor=executor,
        tokenizer=Tokenizer.for_encoding(path),
        embedding=read_pooling(path, config),
        max_model_len=settings.max_model_len,
    )
