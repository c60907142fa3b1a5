"""The sequences of one request."""

from __future__ import annotations

from dataclasses import dataclass

from engine.errors import EngineError
from engine.request import Request
from engine.scheduling.request_state import RequestState


@dataclass(slots=True, eq=False)
class RequestGroup:
    """A request and its `n` sequences, until the last of them ends."""

    request: Request
    states: tuple[RequestState, ...]
    base_seed: int  # of the draws: the request's, or drawn for it
    error: EngineError | None = None
    num_resumed_tokens: int = 0  # generated before, in all sequences

    @property
    def unfinished(self) -> tuple[RequestState, ...]:
        """Sequences still to be run."""
        return tuple(state for state in self.states if not state.is_finished)
