"""Where embedding requests put their sequences."""

from __future__ import annotations

from typing import Protocol

from engine.embedding.embedding_state import EmbeddingState


class SequenceQueue(Protocol):
    """The part of `engine.scheduling.scheduler.Scheduler` that embeddings need; an encoder's queue is another."""

    def add(self, state: EmbeddingState) -> None:
        """Queue a new sequence."""
        ...

    def promote(self, state: EmbeddingState, priority: int) -> None:
        """Make an unfinished sequence more urgent."""
        ...

    def finish(self, state: EmbeddingState, *, kv_is_good: bool = True) -> None:
        """Take out an unfinished sequence and free what it holds."""
        ...
