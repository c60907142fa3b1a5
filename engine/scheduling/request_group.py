"""The sequences of one request for tokens."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request
from engine.scheduling.request_state import RequestState
from engine.scheduling.sequence_group import SequenceGroup


@dataclass(slots=True, eq=False, kw_only=True)
class RequestGroup(SequenceGroup[Request, RequestState]):
    """A request's `n` sequences, and the requests that get what they generate."""

    base_seed: int  # of the draws: the request's, or drawn for it
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # generated before, in all sequences

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, once they are complete, where the request asks for them."""
        found = (state.prompt_logprobs for state in self.states if state.prompt_logprobs is not None)
        return next((entries for entries in found if entries.is_complete), None)

    def choose_scorer(self) -> None:
        """Have the prompt scored by a sequence that is to be run: the first may have ended before a checkpoint."""
        first, unfinished = self.states[0], self.unfinished
        if first.is_finished and unfinished:
            unfinished[0].prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, None
