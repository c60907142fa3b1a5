"""Figures of an engine that is none."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from engine.engine import EngineStats

_IDLE = EngineStats(
    device="cpu",
    dtype="float32",
    num_steps=0,
    num_running=0,
    num_waiting=0,
    num_finished_requests=0,
    num_duplicates=0,
    prompt_tokens=0,
    cached_tokens=0,
    output_tokens=0,
    generated_tokens=0,
    num_preemptions=0,
    num_blocks=1,
    num_free_blocks=0,
    prefix_cache=None,
    decode_graphs=None,
)


def engine_stats(**figures: Any) -> EngineStats:
    """Those of an engine that has done nothing, but for `figures`."""
    return replace(_IDLE, **figures)
