"""Figures of a running engine."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class EngineStats:
    """Figures of a running engine; counters since it was loaded."""

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
    num_blocks: int
    num_free_blocks: int
