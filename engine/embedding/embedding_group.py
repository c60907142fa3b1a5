"""The inputs of one embedding request, and who else waits for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.embedding.embedding_state import EmbeddingState
from engine.embedding_request import EmbeddingRequest


@dataclass(slots=True, eq=False)
class EmbeddingGroup:
    """A request's inputs until the last of them has its vector, and the requests that get these vectors."""

    requests: list[EmbeddingRequest]  # equal but for id and priority; the work is accounted to the first
    states: tuple[EmbeddingState, ...]  # one an input, in order
    key: bytes | None  # names the vectors: equal requests have the same; None where nobody else may share them

    @property
    def arrival(self) -> int:
        """Number of the group among all that the engine ever began."""
        return self.states[0].arrival

    @property
    def priority(self) -> int:
        """That of the most urgent request it ever had."""
        return self.states[0].priority

    @property
    def unfinished(self) -> tuple[EmbeddingState, ...]:
        """Inputs still to be run."""
        return tuple(state for state in self.states if not state.is_finished)
