"""Figures of a running engine."""

from __future__ import annotations

from dataclasses import dataclass

from engine.execution.decode_graph_stats import DecodeGraphStats
from engine.kv_cache.prefix_cache_metrics import PrefixCacheMetrics


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of a running engine; counters since it was loaded. A value: another thread may keep and read it."""

    device: str  # cpu or cuda
    dtype: str  # of weights and KV cache
    num_steps: int  # a step with engine.decode.batched off takes several forward passes
    num_running: int  # sequences that hold blocks
    num_waiting: int  # sequences that hold none
    num_finished_requests: int
    num_duplicates: int  # of these, given what was generated for an equal one
    prompt_tokens: int  # of requests that have ended
    cached_tokens: int  # of these, found in the prefix cache at first admission, or all of a duplicate's
    output_tokens: int  # of requests that have ended, those taken over from a checkpoint or an equal one included
    generated_tokens: int  # sampled by this engine, whatever became of their requests
    num_preemptions: int
    num_blocks: int  # the null block included
    num_free_blocks: int
    prefix_cache: PrefixCacheMetrics | None  # None: the model keeps no KV
    decode_graphs: DecodeGraphStats | None  # None: decode steps are not captured
