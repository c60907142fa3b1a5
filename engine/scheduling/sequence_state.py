"""What the scheduler knows of a sequence."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, TypeVar

from engine.any_request import AnyRequest
from engine.kv_cache.block_hash_chain import BlockHashChain


class SequenceState(ABC):
    """The part of a sequence's life that is the scheduler's, whether tokens or a vector are wanted of it.

    Its subclasses are dataclasses with these fields.
    """

    if not TYPE_CHECKING:
        __slots__ = ()  # those of its fields are the subclasses'

    request: AnyRequest
    index: int  # among the sequences of its request
    arrival: int  # number of the group among all that the engine ever began
    chain: BlockHashChain
    token_ids: list[int]  # what is known of it
    num_computed_tokens: int  # in KV; 0 while waiting
    num_cached_tokens: int  # prompt tokens found in the prefix cache at first admission
    admission: int | None  # order of first admission over the engine's life; None before
    num_preemptions: int
    priority: int  # the request's, or that of a more urgent duplicate of it
    sequence_id: str  # key of its blocks

    @property
    @abstractmethod
    def num_prompt_tokens(self) -> int:
        """Tokens that were given, not generated."""

    @property
    @abstractmethod
    def is_finished(self) -> bool:
        """Whether nothing more is to be computed for it."""

    @property
    def max_cached_tokens(self) -> int:
        """Leading tokens whose KV may come from the prefix cache: all but the last, which is always computed."""
        return len(self.token_ids) - 1

    @property
    def num_uncomputed_tokens(self) -> int:
        """Tokens known but not in KV: 1 in decode, more in prefill."""
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
