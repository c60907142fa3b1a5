"""Loads the engine for a checkpoint: derives settings, loads the model, sizes the KV pool, warms up."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import structlog
import torch

from engine.checkpoint.embedding_config import EmbeddingConfig
from engine.checkpoint.model_config import EncoderConfig, ModelConfig, read_config, read_generation_config
from engine.checkpoint.weights import Checkpoint
from engine.encoder import EncoderEngine
from engine.engine import Engine
from engine.errors import CheckpointError, EngineFatal
from engine.execution.batch import BatchStaging, ForwardItem, plan_batch
from engine.execution.decode_graphs import DecodeGraphs, make_decode_graphs
from engine.execution.forward import EncoderExecutor, StepExecutor
from engine.execution.profile import PassTrace
from engine.kv_cache.block_manager import BlockManager
from engine.kv_cache.tensors import KVCacheSpec, KVCacheTensors
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
from engine.models.load import load_decoder, load_encoder, stream_decoder
from engine.models.placement import ModelPlacement, prepare_placement
from engine.out_of_memory import POOL_SETTINGS, WEIGHTS_ADVICE, naming_settings
from engine.parts import EncoderParts, EngineParts
from engine.text.tokenizer import Tokenizer
from kernels.dispatch import operations
from settings import EffectiveSettings, Source

_log = structlog.get_logger(__name__)
GRAPH_ADVICE = "lower engine.gpu_memory_utilization, engine.kv_cache.num_blocks or engine.max_num_seqs"

NUM_SEQUENCES = 32
SEQUENCE_TOKENS = 8


def load_engine(effective: EffectiveSettings, pass_trace: PassTrace | None = None) -> Engine | EncoderEngine:
    """Derive what is not set, load the model of model.path, warm it up.

    Forward passes that engine.profile selects go into `pass_trace`. Raises CheckpointError, SettingsError (model.path
    leads out of model.root), CapabilityError (a setting this device, build or kind of model cannot honour),
    NonFiniteLogits.
    """
    path = model_path(effective)
    config = read_config(path)
    effective = derive_for(effective, path, config)
    if isinstance(config, EncoderConfig):
        return EncoderEngine(load_encoder_parts(effective, path, config, pass_trace))
    return Engine(load_decoder_parts(effective, path, config, pass_trace))


def load_decoder_parts(
    effective: EffectiveSettings,
    path: Path,
    config: ModelConfig,
    pass_trace: PassTrace | None = None,
    open_checkpoint: Callable[[Path], Checkpoint] = Checkpoint.open,
) -> EngineParts:
    """Load everything a decoder's engine needs, and warm up. effective: fully derived.

    Pools, hash table and weights are made here and live as long as the engine. Forward passes that engine.profile
    selects go into `pass_trace`, the warm-up's too. On a GPU kernels are compiled and memory is measured first, and an
    estimated pool is replaced. Raises CheckpointError, NonFiniteLogits, CapabilityError (memory ran out).
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
        executor.kv_cache.num_blocks, settings.kv_cache.block_size, prefix_caching=settings.prefix_cache.enabled
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
        eos_token_ids=read_eos_token_ids(path, config),
        embedding=EmbeddingConfig.from_directory(path, size=config.hidden_size, default="last_token"),
    )


def read_eos_token_ids(path: Path, config: ModelConfig) -> frozenset[int]:
    """The token ids that end a sequence. Raises CheckpointError for one that the model does not have."""
    ids = read_generation_config(path).eos_token_ids
    beyond = sorted(token_id for token_id in ids if not 0 <= token_id < config.vocab_size)
    if beyond:
        raise CheckpointError(
            f"eos_token_id {beyond[0]} is outside the vocabulary; accepted: 0 to {config.vocab_size - 1}"
        )
    return ids


def _load_model(effective: EffectiveSettings, config: ModelConfig, checkpoint: Checkpoint) -> DecoderModel:
    settings = effective.settings.engine
    placement = prepare_placement(settings, max_positions=longest_row(effective, config))
    num_bytes = expected_weights_bytes(checkpoint, config, settings)
    with naming_settings("the weights", num_bytes, WEIGHTS_ADVICE):
        model = load_decoder(config, checkpoint, placement)
        if settings.quantization != "none" and model.lm_head is not None:  # what is compared is logits
            spec = kv_cache_spec(effective, config)
            error = measure_quantization_error(model, config, checkpoint, placement, spec)
            _log.info("quantization_error", quantization=settings.quantization, **asdict(error))
    return model


def _measured(
    effective: EffectiveSettings, config: ModelConfig, model: DecoderModel
) -> tuple[EffectiveSettings, MemoryProfile | None]:
    """The settings with the pool that fits, unless somebody set one, and where the memory goes; None on a CPU."""
    memory = device_memory(model.device)
    if memory is None:
        return effective, None
    settings, longest, spec = (
        effective.settings.engine,
        longest_row(effective, config),
        kv_cache_spec(effective, config),
    )

    def make_graphs(kv_cache: KVCacheTensors) -> DecodeGraphs | None:
        return make_decode_graphs(model, kv_cache, settings, longest)

    profile = measure_memory(model, spec, settings, longest, memory, make_graphs)
    if effective.source_of(NUM_BLOCKS) is Source.ESTIMATED:
        effective = with_measured_pool(effective, config, profile)
    log_memory_profile(profile, spec, effective.settings.engine)
    return effective, profile


def _make_executor(
    effective: EffectiveSettings, config: ModelConfig, model: DecoderModel, pass_trace: PassTrace | None
) -> StepExecutor:
    """With its KV pool, and graphs that are not captured yet."""
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
        embedding=EmbeddingConfig.from_directory(path, size=config.hidden_size, default="mean"),
        max_model_len=settings.max_model_len,
    )


@dataclass(frozen=True)
class QuantizationError:
    """Differences of logits, in units of the standard deviation of the unquantised row they are in."""

    max_error: float
    mean_error: float
    same_greedy_tokens: float  # share of rows whose largest logit is the same token's


def measure_quantization_error(
    model: DecoderModel, config: ModelConfig, checkpoint: Checkpoint, placement: ModelPlacement, spec: KVCacheSpec
) -> QuantizationError:
    """Compare the model with its unquantised weights, of which one layer at a time is in memory.

    On 32 sequences of 8 token ids, drawn uniformly with a fixed seed: the same for every run of a vocabulary's size,
    and no natural text, on which a model is surer of its next token.
    """
    plain = stream_decoder(config, checkpoint, replace(placement, ops=operations(placement.device)))
    expected, actual = _logits(plain, spec), _logits(model, spec)
    error = (actual - expected).abs() / expected.std(dim=1, keepdim=True)
    same = (actual.argmax(1) == expected.argmax(1)).float().mean()
    return QuantizationError(float(error.max()), float(error.mean()), float(same))


def _logits(model: DecoderModel, spec: KVCacheSpec) -> torch.Tensor:
    generator = torch.Generator().manual_seed(0)
    shape = (NUM_SEQUENCES, SEQUENCE_TOKENS)
    token_ids = torch.randint(model.config.vocab_size, shape, generator=generator).tolist()
    blocks_each = -(-SEQUENCE_TOKENS // spec.block_size)
    items = []
    for index, row in enumerate(token_ids):
        first = 1 + index * blocks_each  # block 0 is the null block
        items.append(ForwardItem(row, 0, range(first, first + blocks_each), wants_logits=True))
    kv_cache = KVCacheTensors.allocate(spec, 1 + NUM_SEQUENCES * blocks_each, model.device)
    batch = BatchStaging(model.device).stage(plan_batch(items, spec.block_size))
    return model.forward(batch, kv_cache).logits
