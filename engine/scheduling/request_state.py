"""The life of one sequence of a request inside the engine."""

from __future__ import annotations

from dataclasses import dataclass, field

from engine.finish_reason import FinishReason
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request
from engine.sampling.token_counts import TokenCounts
from engine.scheduling.sequence_state import SequenceState
from engine.structured.grammar_matcher import GrammarMatcher
from engine.token_logprobs import TokenLogprobs


@dataclass(slots=True, eq=False, kw_only=True)
class RequestState(SequenceState):
    """One of a request's `n` sequences. Written by the scheduler, and by the output processor where it says so."""

    request: Request
    seed: int  # of the draws: (seed, position) decides, nothing else
    max_tokens: int  # the request's, or what the context leaves
    num_checkpointed_tokens: int = 0  # of the output, in the last checkpoint taken
    counts: TokenCounts | None = None  # output processor; None without penalties
    matcher: GrammarMatcher | None = None  # output processor; None without a grammar, or while that is compiled
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    prompt_logprobs: PromptLogprobs | None = None  # of one of a request's sequences, where it asks for them
    text_parts: list[str] = field(default_factory=list)  # output processor: text released so far
    finish_reason: FinishReason | None = None
    stop_reason: str | int | None = None

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
    def num_uncomputed_tokens(self) -> int:
        """See SequenceState. A pending token counts, unless the sequence ends with it."""
        known, pending = len(self.token_ids) - self.num_computed_tokens, self.num_pending_tokens
        return known + pending if pending and self.num_output_tokens + pending < self.max_tokens else known

    @property
    def needs_answer(self) -> bool:
        """See SequenceState. Penalties and grammars follow each token, and a prompt is scored in order."""
        follows_tokens = self.counts is not None or self.matcher is not None
        return self.scores_prompt or (follows_tokens and self.num_pending_tokens > 0)

    @property
    def max_cached_tokens(self) -> int | None:
        """See SequenceState. The model must say something about each prompt token that has no log-probability yet."""
        if self.prompt_logprobs is None or self.prompt_logprobs.is_complete:
            return None
        return self.prompt_logprobs.num_scored

    @property
    def scores_prompt(self) -> bool:
        """Whether log-probabilities of the prompt are still to be computed for it."""
        return self.prompt_logprobs is not None and not self.prompt_logprobs.is_complete

    @property
    def wants_logits(self) -> bool:
        """Always: a chunk's tell whether its KV is good."""
        return True

    @property
    def wants_hidden(self) -> bool:
        """As long as its prompt is scored."""
        return self.scores_prompt

    @property
    def is_finished(self) -> bool:
        """Whether nothing more will be generated."""
        return self.finish_reason is not None
