"""Sizes the KV pool, by what weights and a step are expected to take, and with it the longest request."""

from __future__ import annotations

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Checkpoint, is_body_alone
from engine.errors import CapabilityError
from engine.kv_cache.tensors import KVCacheSpec
from engine.loading.memory import CudaDeviceMemory, DeviceMemory, free_memory_bytes, num_blocks_that_fit
from engine.model_status import MemoryProfile
from engine.models.placement import DTYPES
from engine.out_of_memory import POOL_SETTINGS, STEP_SETTINGS
from engine.prompt_logprobs import MAX_LOGITS_BYTES
from kernels.cpu.dense import has_blocked_layout
from settings import EffectiveSettings, EngineSettings, Source

NUM_BLOCKS = "engine.kv_cache.num_blocks"
MAX_MODEL_LEN = "engine.max_model_len"

# float32 copies of the logits of all rows: themselves, their log-probabilities, the rows that are drawn, those of them
# that are truncated.
LOGITS_COPIES = 4
MASK_BYTES = 2  # of a token of the vocabulary and a row held to a grammar: one in each of two buffers


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory to be measured; None on a CPU, where it is the machine's and `free_memory_bytes` knows it."""
    return CudaDeviceMemory(device) if device.type == "cuda" else None


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


def longest_row(effective: EffectiveSettings, config: ModelConfig) -> int:
    """Tokens that one request may have before the pool has its say."""
    longest = effective.settings.engine.max_model_len
    is_open = longest is None or effective.source_of(MAX_MODEL_LEN) is Source.ESTIMATED
    return config.max_position_embeddings if is_open or longest is None else longest


def derive_pool(
    effective: EffectiveSettings, checkpoint: Checkpoint, config: ModelConfig, memory: DeviceMemory | None
) -> EffectiveSettings:
    """Fill in engine.kv_cache.num_blocks and engine.max_model_len: with `memory` an estimate, to be measured."""
    settings, spec = effective.settings.engine, kv_cache_spec(effective, config)
    weights = expected_weights_bytes(checkpoint, config, settings)
    useful = _useful_blocks(effective, config)
    if memory is None:
        budget = int((free_memory_bytes() - weights) * settings.kv_cache.memory_fraction)
        num_blocks = num_blocks_that_fit(budget, spec.bytes_per_block, useful, POOL_SETTINGS["cpu"])
        return with_pool(effective, config, num_blocks)
    profile = expected_profile(settings, config, weights, memory)
    num_blocks = max(2, min(profile.kv_bytes // spec.bytes_per_block, useful + 1))
    return with_pool(effective, config, num_blocks, is_estimate=True)


def expected_profile(
    settings: EngineSettings, config: ModelConfig, weights_bytes: int, memory: DeviceMemory
) -> MemoryProfile:
    """What `measure_memory` may find. A captured step takes what one that is not captured does."""
    step_bytes = expected_step_bytes(config, settings)
    return MemoryProfile(
        total_bytes=memory.total_bytes,
        usable_bytes=int(memory.total_bytes * settings.gpu_memory_utilization),
        weights_bytes=weights_bytes,
        other_bytes=memory.total_bytes - memory.free_bytes(),
        activations_bytes=step_bytes,
        graphs_bytes=step_bytes if settings.cuda_graphs.enabled else 0,
    )


def with_measured_pool(effective: EffectiveSettings, config: ModelConfig, profile: MemoryProfile) -> EffectiveSettings:
    """The pool that `profile` leaves room for, in the place of the estimate. Raises CapabilityError where that is none,
    or holds less than engine.max_model_len.
    """
    settings, spec = effective.settings.engine, kv_cache_spec(effective, config)
    num_blocks = num_blocks_that_fit(
        profile.kv_bytes,
        spec.bytes_per_block,
        _useful_blocks(effective, config),
        f"engine.gpu_memory_utilization ({settings.gpu_memory_utilization} of {profile.total_bytes} bytes; weights "
        f"take {profile.weights_bytes}, a step {profile.activations_bytes}, graphs {profile.graphs_bytes}, others "
        f"{profile.other_bytes}), lower {STEP_SETTINGS}",
    )
    return with_pool(effective, config, num_blocks)


def with_pool(
    effective: EffectiveSettings, config: ModelConfig, num_blocks: int, *, is_estimate: bool = False
) -> EffectiveSettings:
    """What one request may hold: the model's context, or the whole pool where that is less."""
    settings = effective.settings.engine
    pool = (num_blocks - 1) * settings.kv_cache.block_size
    is_set = settings.max_model_len is not None and effective.source_of(MAX_MODEL_LEN) is not Source.ESTIMATED
    if is_set and longest_row(effective, config) > pool and not is_estimate:
        raise CapabilityError(
            f"{MAX_MODEL_LEN}={settings.max_model_len}: the KV pool of {num_blocks} blocks holds {pool} tokens; "
            f"lower it, or raise {POOL_SETTINGS[settings.device]}"
        )
    derived = {NUM_BLOCKS: num_blocks, MAX_MODEL_LEN: min(config.max_position_embeddings, pool)}
    return effective.with_derived(derived, is_estimate=is_estimate)


def _useful_blocks(effective: EffectiveSettings, config: ModelConfig) -> int:
    """Those that max_num_seqs sequences of full length hold."""
    settings = effective.settings.engine
    return settings.max_num_seqs * -(-longest_row(effective, config) // settings.kv_cache.block_size)


def expected_weights_bytes(checkpoint: Checkpoint, config: ModelConfig, settings: EngineSettings) -> int:
    """Bytes under fully derived device, dtype and quantization, within a hundredth.

    A tied head is a second copy of the embedding where a CPU's kernels have a layout of their own for it. Norms and
    routers, which stay in the model dtype, and the scales of quantised weights are left out of the account: together
    below a hundredth.
    """
    itemsize = DTYPES[settings.dtype].itemsize
    num_elements = checkpoint.total_bytes // DTYPES[config.dtype].itemsize
    embedding = config.vocab_size * config.hidden_size
    has_own_layout = settings.quantization == "int8" or has_blocked_layout(DTYPES[settings.dtype])
    is_packed = settings.device == "cpu" and not settings.deterministic and has_own_layout
    if config.tie_word_embeddings and is_packed and not is_body_alone(checkpoint.names()):
        num_elements += embedding
    if settings.quantization == "int8":
        return embedding * itemsize + (num_elements - embedding)
    return num_elements * itemsize


def expected_step_bytes(config: ModelConfig, settings: EngineSettings) -> int:
    """Bytes that the largest step takes under a fully derived dtype: an estimate, which loading the model measures.

    The largest of a layer over all tokens, of scoring a slice of a prompt (float32 logits and their log-softmax) and of
    sampling over all sequences; they follow each other.
    """
    itemsize = DTYPES[settings.dtype].itemsize
    attention = (2 * config.num_heads + 2 * config.num_kv_heads) * config.head_dim
    feed_forward = 3 * config.intermediate_size
    if config.moe is not None:
        feed_forward = config.moe.experts_per_token * (3 * config.moe.intermediate_size + config.hidden_size)
    layer = settings.max_num_batched_tokens * (4 * config.hidden_size + max(attention, feed_forward)) * itemsize
    logits = settings.max_num_seqs * config.vocab_size * (itemsize + 4 * LOGITS_COPIES + MASK_BYTES)
    scored_tokens = min(settings.max_num_batched_tokens, MAX_LOGITS_BYTES // (4 * config.vocab_size))
    return max(layer, logits, scored_tokens * config.vocab_size * 8)
