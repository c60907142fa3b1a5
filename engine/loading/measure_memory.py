"""How much of a GPU's memory the KV pool may have."""

from __future__ import annotations

import gc
from collections.abc import Callable

from engine.execution.decode_graphs import DecodeGraphs
from engine.kv_cache.kv_cache_spec import KVCacheSpec
from engine.kv_cache.kv_cache_tensors import KVCacheTensors
from engine.loading.device_memory import DeviceMemory
from engine.loading.expected_step import expected_step_bytes
from engine.loading.memory_profile import MemoryProfile
from engine.loading.warm_up import WARM_UP_BLOCKS, WarmUp
from engine.models.decoder_model import DecoderModel
from engine.models.weights_bytes import weights_bytes
from engine.out_of_memory import STEP_SETTINGS, naming_settings
from settings import EngineSettings

MakeGraphs = Callable[[KVCacheTensors], DecodeGraphs | None]


def measure_memory(
    model: DecoderModel,
    spec: KVCacheSpec,
    settings: EngineSettings,
    max_model_len: int,
    memory: DeviceMemory,
    make_graphs: MakeGraphs,
) -> MemoryProfile:
    """Run the largest steps and capture the decode graphs over a KV cache of two blocks, and see what they take.

    Kernels are compiled on the way, so that none is in mid-job. Everything made here is given back. Peak of the steps:
    in one go, without giving memory back between them, as later in a job. Graphs are captured a second time over the
    real cache, since a graph holds its address: they take as much again.

    max_model_len: most tokens of a row, before the pool bounds it. Raises CapabilityError where memory runs out.
    """
    kv_cache = KVCacheTensors.allocate(spec, WARM_UP_BLOCKS, model.device)
    warm_up = WarmUp(model, kv_cache, settings, max_model_len)
    activations_bytes = _steps_bytes(warm_up, memory, settings)
    graphs_bytes = _graphs_bytes(warm_up, memory, settings, make_graphs)
    del warm_up, kv_cache
    gc.collect()  # whatever of it refers to itself
    memory.reset_peak()
    weights = weights_bytes(model)
    rounding_bytes = 2 * spec.num_layers * memory.rounding_bytes  # of keys and values, a tensor a layer each
    return MemoryProfile(
        total_bytes=memory.total_bytes,
        usable_bytes=int(memory.total_bytes * settings.gpu_memory_utilization),
        weights_bytes=weights,
        other_bytes=max(memory.total_bytes - memory.free_bytes() - weights, 0) + rounding_bytes,
        activations_bytes=activations_bytes,
        graphs_bytes=graphs_bytes,
    )


def _steps_bytes(warm_up: WarmUp, memory: DeviceMemory, settings: EngineSettings) -> int:
    memory.reset_peak()
    before = memory.peak_bytes()
    tokens, seqs = settings.max_num_batched_tokens, settings.max_num_seqs
    what = f"a step of {tokens} tokens and {seqs} sequences, beside the weights"
    with naming_settings(what, expected_step_bytes(warm_up.config, settings), f"lower {STEP_SETTINGS}"):
        warm_up.run_largest()
        warm_up.run_compiling()
    return memory.peak_bytes() - before


def _graphs_bytes(warm_up: WarmUp, memory: DeviceMemory, settings: EngineSettings, make_graphs: MakeGraphs) -> int:
    """By what the driver has less, since a graph's nodes are no tensors."""
    memory.reset_peak()
    free = memory.free_bytes()
    expected_bytes = expected_step_bytes(warm_up.config, settings)
    with naming_settings("the decode graphs, beside the weights", expected_bytes, "lower engine.max_num_seqs"):
        graphs = make_graphs(warm_up.kv_cache)
        if graphs is None:
            return 0
        graphs.capture_all()
        warm_up.replay(graphs)
    memory.reset_peak()
    return max(free - memory.free_bytes(), 0)
