"""Sizes the KV pool, and with it the longest request: free memory, less what weights and a step will take."""

from __future__ import annotations

import math
from pathlib import Path

import torch

from engine.checkpoint.model_config import ModelConfig
from engine.checkpoint.weights import Checkpoint, is_body_alone
from engine.errors import CapabilityError
from engine.kv_cache.tensors import KVCacheSpec
from engine.model_status import MemoryProfile
from engine.models.decoder import packed_weights
from engine.models.load import describe_decoder
from engine.models.placement import DTYPES, INT4, choose_operations, kv_cache_dtype
from engine.out_of_memory import POOL_SETTINGS, STEP_SETTINGS
from engine.prompt_logprobs import MAX_LOGITS_BYTES
from kernels.quantised import PackedQuantised
from settings import EffectiveSettings, EngineSettings, Source

NUM_BLOCKS = "engine.kv_cache.num_blocks"
MAX_MODEL_LEN = "engine.max_model_len"

# float32 copies of the logits of all rows: themselves, their log-probabilities, the rows that are drawn, those of them
# that are truncated; with Triton instead of the last two the scores among which a row's threshold is sought.
LOGITS_COPIES = 4
SCALE_BYTES = 4  # of a group of weights that are rounded as they are loaded
MASK_BYTES = 2  # of a token of the vocabulary and a row bound to a grammar: one in each of two buffers

MEMINFO = Path("/proc/meminfo")
CGROUP = Path("/sys/fs/cgroup")


def device_memory(device: torch.device) -> DeviceMemory | None:
    """The memory to be measured; None on a CPU, where it is the machine's and `free_memory_bytes` knows it."""
    return DeviceMemory(device) if device.type == "cuda" else None


def kv_cache_spec(effective: EffectiveSettings, config: ModelConfig) -> KVCacheSpec:
    """Shape of the KV cache under fully derived settings."""
    settings = effective.settings.engine
    return KVCacheSpec(
        num_layers=config.num_layers,
        block_size=settings.kv_cache.block_size,
        num_kv_heads=config.num_kv_heads,
        head_dim=config.head_dim,
        dtype=kv_cache_dtype(settings),
    )


def longest_row(effective: EffectiveSettings, config: ModelConfig) -> int:
    """Tokens that one request may have, were the pool large enough."""
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
    """An estimate of what `measure_memory` will find; a captured step takes what one that is not captured does."""
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
    or less than engine.max_model_len.
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
    """Fill in engine.kv_cache.num_blocks, and engine.max_model_len: the model's context or the pool, the smaller one.

    Raises CapabilityError where the pool is smaller than an engine.max_model_len that was set.
    """
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
    """Blocks that max_num_seqs sequences of full length take."""
    settings = effective.settings.engine
    return settings.max_num_seqs * -(-longest_row(effective, config) // settings.kv_cache.block_size)


def expected_weights_bytes(checkpoint: Checkpoint, config: ModelConfig, settings: EngineSettings) -> int:
    """Bytes under fully derived device, dtype and quantization, within a hundredth.

    A tied head is a second copy of the embedding where a CPU's kernels have a layout of their own for it, in which rows
    cannot be looked up. Norms and routers, which stay in the model dtype, and the scales of quantised weights are left
    out of the account: together below a hundredth.
    """
    itemsize = DTYPES[settings.dtype].itemsize
    quantised_bytes = 0
    if config.quantization is None:
        num_elements = checkpoint.total_bytes // DTYPES[config.dtype].itemsize
    else:
        quantised_bytes, num_elements = _stored_sizes(checkpoint, config)
    embedding = config.vocab_size * config.hidden_size
    if config.tie_word_embeddings and _has_lm_head(checkpoint, config) and _copies_head(settings):
        num_elements += embedding
    if settings.quantization == "int8":
        return embedding * itemsize + (num_elements - embedding)
    if settings.quantization == "int4":
        rounded = num_elements - embedding
        return embedding * itemsize + rounded // 2 + rounded * SCALE_BYTES // (INT4.group_size or 1)
    return quantised_bytes + num_elements * itemsize


def _copies_head(settings: EngineSettings) -> bool:
    """Whether a head that is tied to the embedding lies in memory beside it: tried with a small one."""
    if settings.device != "cpu" or settings.quantization != "none":
        return settings.device == "cpu"
    weight = torch.zeros(32, 32, dtype=DTYPES[settings.dtype])
    packed = choose_operations(settings, torch.device("cpu")).pack(weight)
    return not packed.has_rows and packed.parts[0] is not weight


def _has_lm_head(checkpoint: Checkpoint, config: ModelConfig) -> bool:
    return config.classifier is None and not is_body_alone(checkpoint.names())


def _stored_sizes(checkpoint: Checkpoint, config: ModelConfig) -> tuple[int, int]:
    """Bytes of the quantised weights as they will lie in memory, and elements of the others that products take and of
    the embedding; from the files' headers.
    """
    weights = tuple(packed_weights(describe_decoder(config, checkpoint)))
    quantised = sum(weight.nbytes for weight in weights if isinstance(weight, PackedQuantised))
    plain = sum(math.prod(weight.shape) for weight in weights if not isinstance(weight, PackedQuantised))
    is_separate = not config.tie_word_embeddings or not _has_lm_head(checkpoint, config)
    return quantised, plain + (config.vocab_size * config.hidden_size if is_separate else 0)


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
        feed_forward += 3 * config.moe.shared_size
    layer = settings.max_num_batched_tokens * (4 * config.hidden_size + max(attention, feed_forward)) * itemsize
    logits = settings.max_num_seqs * config.vocab_size * (itemsize + 4 * LOGITS_COPIES + MASK_BYTES)
    scored_tokens = min(settings.max_num_batched_tokens, MAX_LOGITS_BYTES // (4 * config.vocab_size))
    return max(layer, logits, scored_tokens * config.vocab_size * 8)


def free_memory_bytes() -> int:
    """Bytes that an allocation could still get: MemAvailable of the machine or what the container's limit leaves,
    whichever is less. Raises CapabilityError where neither can be read.
    """
    available = meminfo_available_bytes(MEMINFO)
    headroom = cgroup_headroom_bytes(CGROUP)
    return available if headroom is None else min(available, headroom)


def meminfo_available_bytes(path: Path) -> int:
    """MemAvailable of a Linux meminfo file."""
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        raise CapabilityError(f"{path} cannot be read ({error}): set engine.kv_cache.num_blocks") from error
    for line in lines:
        name, _, rest = line.partition(":")
        if name == "MemAvailable":
            return int(rest.split()[0]) * 1024
    raise CapabilityError(f"{path} has no MemAvailable: set engine.kv_cache.num_blocks")


def cgroup_headroom_bytes(root: Path) -> int | None:
    """What the container's memory limit (cgroup v2) leaves; None where there is no limit.

    Pages of files count as free: the mapped weights lie there, and the kernel drops them before it refuses memory.
    """
    try:
        limit = (root / "memory.max").read_text().strip()
        used = int((root / "memory.current").read_text())
        statistics = dict(line.split() for line in (root / "memory.stat").read_text().splitlines())
    except FileNotFoundError:
        return None
    reclaimable = int(statistics.get("active_file", 0)) + int(statistics.get("inactive_file", 0))
    return None if limit == "max" else max(0, int(limit) - used + reclaimable)


def num_blocks_that_fit(budget_bytes: int, bytes_per_block: int, useful_blocks: int, settings: str) -> int:
    """Blocks for a budget, the null block included, and no more than can ever be of use.

    Raises CapabilityError, which says to raise `settings`, when not even one block besides the null block fits.
    """
    fit = budget_bytes // bytes_per_block
    if fit < 2:
        raise CapabilityError(
            f"the memory left for the KV cache is {max(0, budget_bytes)} bytes, two blocks need {2 * bytes_per_block}: "
            f"raise {settings}, or free memory"
        )
    return min(fit, useful_blocks + 1)


class DeviceMemory:
    """The memory of a GPU, as the driver and PyTorch's allocator account for it.

    The peak is what the allocator reserved, not what tensors took of it: the pieces between them, which steps of many
    shapes leave, are gone as well.
    """

    # What a large tensor may take beyond its own size: the allocator asks for multiples of 2 MiB from 10 MiB on.
    rounding_bytes = 2 << 20

    def __init__(self, device: torch.device) -> None:
        self._device = device

    @property
    def total_bytes(self) -> int:
        """What the GPU has."""
        _, total = torch.cuda.mem_get_info(self._device)
        return int(total)

    def free_bytes(self) -> int:
        """What the driver could still give: what neither other processes nor this one's caches hold."""
        free, _ = torch.cuda.mem_get_info(self._device)
        return int(free)

    def reset_peak(self) -> None:
        """Wait for what runs, since its memory may still be in use; give cached memory back, begin a new peak."""
        torch.cuda.synchronize(self._device)
        torch.cuda.empty_cache()
        torch.cuda.reset_peak_memory_stats(self._device)

    def peak_bytes(self) -> int:
        """The most that this process has reserved at once since `reset_peak`, what it held then included."""
        torch.cuda.synchronize(self._device)
        return int(torch.cuda.max_memory_reserved(self._device))
