"""The life of one sequence of a request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.finish_reason import FinishReason
from engine.kv_cache.block_hash_chain import BlockHashChain
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.sequence_state import SequenceState
from engine.structured.grammar_matcher import GrammarMatcher
from engine.token_logprobs import TokenLogprobs


@dataclass(slots=True, eq=False)
class RequestState(SequenceState):
    """One of a request's `n` sequences. Written by the scheduler, and by the output processor where it says so."""

    request: Request
    index: int  # 0 .. n - 1
    arrival: int  # number of the group among all that the engine ever began
    seed: int  # of the draws: (seed, position) decides, nothing else
    max_tokens: int  # the request's, or what the context leaves
    chain: BlockHashChain
    token_ids: list[int]  # prompt, then output
    num_computed_tokens: int = 0  # in KV; 0 while waiting
    num_cached_tokens: int = 0  # prompt tokens found in the prefix cache at first admission
    admission: int | None = None  # order of first admission over the engine's life; None before
    num_preemptions: int = 0
    num_checkpointed_tokens: int = 0  # of the output, in the last checkpoint taken
    counts: TokenCounts | None = None  # output processor; None without penalties
    matcher: GrammarMatcher | None = None  # output processor; None without a grammar, or while that is compiled
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # of one of a request's sequences, where it asks for them
    text_parts: list[str] = field(default_factory=list)  # output processor: text released so far
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None
    priority: int = field(init=False)  # the request's, or that of a more urgent duplicate of it
    sequence_id: str = field(init=False)  # key of its blocks and of its text

    def __post_init__(self) -> None:
        self.priority = self.request.priority
        # Not the request's id alone: the sequence may outlive its request, whose id may then come again.
        self.sequence_id = f"{self.request.request_id}/{self.arrival}/{self.index}"

    @property
    def num_prompt_tokens(self) -> int:
        """Tokens of the prompt."""
        return len(self.request.prompt_token_ids)

    @property
    def output_token_ids(self) -> list[int]:
        """Tokens generated so far."""
        return self.token_ids[self.num_prompt_tokens :]

    @property
    def num_output_tokens(self) -> int:
        """Number of tokens generated so far."""
        return len(self.token_ids) - self.num_prompt_tokens

    @property
    def max_cached_tokens(self) -> int:
        """See SequenceState. The model must say something about each prompt token that has no log-probability yet."""
        if self.scores_prompt and self.prompt_logprobs is not None:
            return self.prompt_logprobs.num_scored
        return len(self.token_ids) - 1

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed for it."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None
