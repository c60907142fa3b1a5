"""Times of all sizes of the axes, on one small model."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from statistics import median
from typing import Any

from engine.engine import Engine
from engine.loading.derived_settings import usable_cores
from tests.benchmarks.peers.arithmetic import Arithmetic
from tests.benchmarks.peers.model_cost import ModelCost
from tests.benchmarks.peers.workload import Workload
from tests.benchmarks.scaling.axis import Axis
from tests.benchmarks.scaling.scaling_point import ScalingPoint
from tests.support.decoder_config import decoder_config
from tests.support.engines import greedy_request, load_engine, run_all
from tests.support.tiny_checkpoint import make_checkpoint

SHAPE: dict[str, Any] = {
    "hidden_size": 256,
    "intermediate_size": 768,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 8192,
    "initializer_range": 0.02,
}
NUM_IDS = 256  # the tokenizer's bytes
NUM_BLOCKS = 8192  # 131,072 tokens, 270 MB: nothing is preempted


def small_model(directory: Path) -> Path:
    """4 layers of width 256, float32."""
    return make_checkpoint(directory / "small", "qwen3", **SHAPE)


def measure(model: Path, axes: Sequence[Axis], rounds: int) -> list[ScalingPoint]:
    """Every size once a round; the first round's first size is run once more before, to warm up."""
    cost = ModelCost.of(decoder_config(model))
    engine = load_engine(model, {"engine.num_threads": usable_cores(), "engine.kv_cache.num_blocks": NUM_BLOCKS})
    loads = {(axis.name, size): axis.workload(size) for axis in axes for size in axis.sizes}
    _seconds(engine, next(iter(loads.values())), -1)
    seconds = [{key: _seconds(engine, load, number) for key, load in loads.items()} for number in range(rounds)]
    engine.close()
    return [
        ScalingPoint(
            *key,
            num_tokens=load.num_requests * (load.prompt_tokens + load.max_tokens),
            seconds=median(round_s[key] for round_s in seconds),
            flop=sum(Arithmetic(load, cost).total()),
        )
        for key, load in loads.items()
    ]


def _seconds(engine: Engine, workload: Workload, seed: int) -> float:
    requests = [
        greedy_request(str(number), [token_id % NUM_IDS for token_id in prompt], workload.max_tokens)
        for number, prompt in enumerate(workload.prompts(seed))
    ]
    start = time.perf_counter()
    run_all(engine, requests)
    return time.perf_counter() - start
