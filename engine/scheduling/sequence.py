"""The state of one sequence: what the scheduler knows of it, and what generating tokens adds."""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from engine.kv_cache.block_manager import BlockHashChain
from engine.request import AnyRequest, FinishReason, PromptLogprobs, Request, TokenLogprobs
from engine.structured.matcher import GrammarMatcher

MOST_DRAFTED = 64  # what the settings accept


@dataclass(slots=True, eq=False, kw_only=True)
class SequenceState(ABC):
    """What the scheduler knows about a sequence, whether it is to give tokens or a vector."""

    request: AnyRequest
    index: int  # among the sequences of its request
    arrival: int  # number of the group among all that the engine ever began
    chain: BlockHashChain
    token_ids: list[int]  # known so far
    num_pending_tokens: int = 0  # after these: chosen by steps whose answers are not known yet
    num_computed_tokens: int = 0  # in KV once the steps scheduled so far have run; 0 while waiting
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    looked_up: str = ""  # the tokens that speculation has seen so far, as characters
    max_drafted: int = MOST_DRAFTED  # tokens that speculation drafts next at most: follows what was accepted
    admission: int | None = None  # order of first admission over the engine's life; None before
    num_preemptions: int = 0
    arrived_s: float = field(default_factory=time.monotonic)
    scheduled_s: float | None = None  # time.monotonic() of the first admission
    first_token_s: float | None = None  # time.monotonic() when the first token generated here was known
    priority: int = field(init=False)  # the request's, or that of a more urgent duplicate of it
    sequence_id: str = field(init=False)  # key of its blocks and of its text

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        # The request's id alone would not do: a sequence may outlive its request, whose id may then be used again.
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
    def num_draftable_tokens(self) -> int:
        """Tokens that may be drafted behind those that are known; 0 where none is generated."""
        return 0

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


class TokenCounts:
    """How often each token of a sequence was generated; 0 for those that occur only in the prompt.

    Kept with the sequence, because counting anew at each step takes quadratic time.
    """

    def __init__(self, prompt_token_ids: Sequence[int]) -> None:
        self.generated = dict.fromkeys(prompt_token_ids, 0)

    def with_tokens(self, token_ids: Iterable[int]) -> TokenCounts:
        """A copy that has these, too."""
        copy = TokenCounts(())
        copy.generated = self.generated.copy()
        for token_id in token_ids:
            copy.add(token_id)
        return copy

    def add(self, token_id: int) -> None:
        """Count a generated token."""
        self.generated[token_id] = self.generated.get(token_id, 0) + 1


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState(SequenceState):
    """One of a request's `n` sequences. Written by the scheduler, and by the output processor where noted."""

    request: Request
    seed: int  # only (seed, position) decide a draw
    max_tokens: int  # the request's, or what the context leaves
    num_saved_tokens: int = 0  # of the output, in the last resume state taken
    counts: TokenCounts | None = None  # output processor; None without penalties
    matcher: GrammarMatcher | None = None  # output processor; None without a grammar, or while that is compiled
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # of one of a request's sequences, where it asks for them
    text_parts: list[str] = field(default_factory=list)  # output processor: text released so far
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    num_prompt_tokens: int = field(init=False)  # these are asked for with each token
    max_len: int = field(init=False)  # tokens at which it ends, prompt and output together
    takes_best: bool = field(init=False)  # see SamplingParams

    def __post_init__(self) -> None:
        SequenceState.__post_init__(self)  # super() does not know a class with slots
        self.num_prompt_tokens = len(self.request.prompt_token_ids)
        self.max_len = self.num_prompt_tokens + self.max_tokens
        self.takes_best = self.request.params.takes_best

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def num_uncomputed_tokens(self) -> int:
        """See SequenceState. A pending token counts, unless the sequence ends with it."""
        num_known, pending = len(self.token_ids), self.num_pending_tokens
        if pending and num_known + pending < self.max_len:
            num_known += pending
        return num_known - self.num_computed_tokens

    @property
    def num_draftable_tokens(self) -> int:
        """See SequenceState. None where a token would be beyond its end, or while its prompt is scored."""
        return 0 if self.wants_hidden else max(0, self.max_len - len(self.token_ids) - 1)

    @property
    def needs_answer(self) -> bool:
        """See SequenceState. Penalties and grammars need each token, and a prompt is scored in order."""
        if self.num_pending_tokens > 0 and (self.counts is not None or self.matcher is not None):
            return True
        return self.prompt_logprobs is not None and self.scores_prompt

    @property
    def max_cached_tokens(self) -> int | None:
        """See SequenceState. The model must run each prompt token whose next one has no log-probability yet."""
        if self.prompt_logprobs is None or self.prompt_logprobs.is_complete:
            return None
        return self.prompt_logprobs.num_scored

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed for it."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def wants_logits(self) -> bool:
        """Always: the logits of a chunk tell whether its KV is good."""
        return True

    @property
    def wants_hidden(self) -> bool:
        """As long as its prompt is scored."""
        return self.prompt_logprobs is not None and self.scores_prompt

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None
