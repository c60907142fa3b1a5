"""The life of one input of an embedding request."""

from __future__ import annotations

from array import array
from dataclasses import dataclass, field

from engine.embedding.pooler import Pooler
from engine.embedding_request import EmbeddingRequest
from engine.kv_cache.block_hash_chain import BlockHashChain
from engine.scheduling.sequence_state import SequenceState


@dataclass(slots=True, eq=False)
class EmbeddingState(SequenceState):
    """One of a request's inputs: run as a prefill, whose hidden states are pooled. Nothing is generated."""

    request: EmbeddingRequest
    index: int  # 0 .. number of inputs - 1
    arrival: int
    chain: BlockHashChain
    token_ids: list[int]
    pooler: Pooler
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    admission: int | None = None
    num_preemptions: int = 0
    has_ended: bool = False  # it left the queue, with its vector or without
    embedding: array[float] | None = None  # float32, of length 1
    priority: int = field(init=False)
    sequence_id: str = field(init=False)

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        self.sequence_id = f"{self.request.request_id}/{self.arrival}/{self.index}"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the input."""
        return len(self.token_ids)

    @property
    def is_finished(self) -> bool:
        """Whether it left the queue."""
        return self.has_ended
