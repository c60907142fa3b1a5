"""What the scheduler knows of a sequence."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from dataclasses import dataclass, field
from typing import TypeVar

from engine.any_request import AnyRequest
from engine.kv_cache.block_hash_chain import BlockHashChain


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState(ABC):
    """The part of a sequence's life that is the scheduler's, whether tokens or a vector are wanted of it."""

    request: AnyRequest
    index: int  # among the sequences of its request
    arrival: int  # number of the group among all that the engine ever began
    chain: BlockHashChain
    token_ids: list[int]  # what is known of it
    num_pending_tokens: int = 0  # behind these: chosen by steps whose answers are not known yet
    num_computed_tokens: int = 0  # in KV once the steps scheduled so far have run; 0 while waiting
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    admission: int | None = None  # order of first admission over the engine's life; None before
    num_preemptions: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    scheduled_s: float | None = None  # time.monotonic() of the first admission
    first_token_s: float | None = None  # time.monotonic() when the first token generated here was known
    priority: int = field(init=False)  # the request's, or that of a more urgent duplicate of it
    sequence_id: str = field(init=False)  # key of its blocks and of its text

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        # Not the request's id alone: the sequence may outlive its request, whose id may then come again.
        self.sequence_id = f"{self.request.request_id}/{self.arrival}/{self.index}"

    @property
    @abstractmethod
    def num_prompt_tokens(self) -> int:
        """Tokens that were given, not generated."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether nothing more is to be computed for it."""

    @property
    @abstractmethod
    def wants_logits(self) -> bool:
        """Whether the logits of its last scheduled token are needed."""

    @property
    @abstractmethod
    def wants_hidden(self) -> bool:
        """Whether the hidden states of all its scheduled tokens are needed."""

    @property
    def max_cached_tokens(self) -> int | None:
        """Leading tokens whose KV may come from the prefix cache; None: all but the last, as for any sequence."""
        return None

    @property
    def needs_answer(self) -> bool:
        """Whether it cannot be run on before the answer of the step under way is known."""
        return False

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens to be run that are not in KV: 1 in decode, more in prefill."""
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def was_admitted(self) -> bool:
        """Whether it runs or ran: one that waits was preempted."""
        return self.admission is not None

    @property
    def rank(self) -> tuple[int, int]:
        """Order of those that were admitted: the last is preempted first."""
        return (self.priority, self.admission or 0)


State = TypeVar("State", bound=SequenceState)
