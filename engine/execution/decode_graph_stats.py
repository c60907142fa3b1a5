"""Figures of the decode graphs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class DecodeGraphStats:
    """Figures of the decode graphs since the model was loaded."""

    captured_sizes: tuple[int, ...]  # rows of each graph, rising
    failed_sizes: tuple[int, ...]  # whose capture failed, rising: such steps run in a larger graph or eagerly
    num_replays: int
    num_eager_decode_steps: int  # steps of decode rows alone that no graph could serve
