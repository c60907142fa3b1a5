"""The life of one input of an embedding request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass

from engine.embedding.pooler import Pooler
from engine.embedding_request import EmbeddingRequest
from engine.scheduling.sequence_state import SequenceState


@dataclass(slots=True, eq=False, kw_only=True)
class EmbeddingState(SequenceState):
    """One of a request's inputs: run as a prefill, whose hidden states are pooled. Nothing is generated."""

    request: EmbeddingRequest
    pooler: Pooler
    has_ended: bool = False  # it left the queue, with its vector or without
    embedding: array[float] | None = None  # float32, of length 1

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the input."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it left the queue."""
        return self.has_ended

    @property
    def wants_logits(self) -> bool:
        """Never: no token is chosen."""
        return False

    @property
    def wants_hidden(self) -> bool:
        """Always: they are what is pooled."""
        return True
