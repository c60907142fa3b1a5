"""The sequences of one request, and who else waits for them."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.prompt_logprobs import PromptLogprobs
from engine.request import Request
from engine.scheduling.request_state import RequestState


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request's `n` sequences, until the last of them ends, and the requests that get what they generate."""

    requests: list[Request]  # equal but for id and priority; the first is the one the work is accounted to
    states: tuple[RequestState, ...]  # at least one
    base_seed: int  # of the draws: the request's, or drawn for it
    key: bytes | None  # names the tokens: equal requests have the same; None where nobody else may share them
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # generated before, in all sequences

    @property
    def request(self) -> Request:
        """The first of the requests."""
        return self.requests[0]

    @property
    def arrival(self) -> int:
        """Number of the group among all that the engine ever began."""
        return self.states[0].arrival

    @property
    def priority(self) -> int:
        """That of the most urgent request it ever had."""
        return self.states[0].priority

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, once they are complete, where the request asks for them."""
        found = (state.prompt_logprobs for state in self.states if state.prompt_logprobs is not None)
        return next((entries for entries in found if entries.is_complete), None)

    @property
    def unfinished(self) -> tuple[RequestState, ...]:
        """Sequences still to be run."""
        return tuple(state for state in self.states if not state.is_finished)
