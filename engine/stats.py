"""Figures of a running engine: its steps, requests, tokens, blocks, prefix hits and decode graphs. Torch-free."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeGraphStats:
    """Figures of the decode graphs since the model was loaded."""

    captured_sizes: tuple[int, ...]  # rows of each graph, rising
    failed_sizes: tuple[int, ...]  # whose capture failed, rising: such steps run in a larger graph or eagerly
    num_replays: int
    num_eager_decode_steps: int  # steps of decode rows only that no graph could serve
    captured_chunk_tokens: tuple[int, ...] = ()  # of graphs with chunks, rising
    num_chunk_replays: int = 0  # of the replays, those with chunks


@dataclass(frozen=True, slots=True)
class PrefixCacheMetrics:
    """Counters since the pool was made."""

    enabled: bool
    probes: int  # admissions; a preempted sequence counts again
    hits: int  # of those, how many found at least one block
    queried_tokens: int
    saved_prefill_tokens: int  # tokens whose KV was found
    evictions: int  # registered blocks that had to make room
    registered_blocks: int  # blocks a hit could find now, held or free
    used_blocks: int  # blocks held by sequences now
    free_blocks: int
    block_size: int
    registered_bytes: int


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of a running engine; counters since it was loaded. A value: another thread may keep and read it."""

    device: str  # cpu or cuda
    dtype: str  # of weights and KV cache
    num_steps: int = 0  # a step with engine.decode.batched off takes several forward passes
    num_running: int = 0  # sequences that hold blocks
    num_waiting: int = 0  # sequences that hold none
    num_finished_requests: int = 0
    num_duplicates: int = 0  # of these, given the results of an equal one
    prompt_tokens: int = 0  # of requests that have ended
    cached_tokens: int = 0  # of these, found in the prefix cache at first admission, or all of a duplicate's
    output_tokens: int = 0  # of requests that have ended, with those from a resume state or an equal request
    generated_tokens: int = 0  # sampled by this engine, also for requests that failed or were aborted
    drafted_tokens: int = 0  # by speculation, and verified
    accepted_tokens: int = 0  # of these, those that would have been chosen: steps saved
    num_preemptions: int = 0
    num_blocks: int = 0  # the null block included
    num_free_blocks: int = 0
    prefix_cache: PrefixCacheMetrics | None = None  # None: the model keeps no KV
    decode_graphs: DecodeGraphStats | None = None  # None: decode steps are not captured
