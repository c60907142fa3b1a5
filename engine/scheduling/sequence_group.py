"""The sequences of one request, and who else waits for them."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.any_request import AnyRequest
from engine.errors import EngineError, InvalidRequest
from engine.request_timings import RequestTimings
from engine.scheduling.sequence_state import State

Asked = TypeVar("Asked", bound=AnyRequest)


@dataclass(slots=True, eq=False)
class SequenceGroup(Generic[Asked, State]):
    """A request's sequences, until the last of them ends, and the requests that get what comes of them."""

    requests: list[Asked]  # equal but for id and priority; the first is the one the work is accounted to
    states: tuple[State, ...]  # at least one
    key: bytes | None  # names what comes of them: equal requests have the same; None where nobody else may share it
    _num_leading_finished: int = field(default=0, init=False)  # sequences, at least

    @property
    def request(self) -> Asked:
        """The first of the requests."""
        return self.requests[0]

    @property
    def arrival(self) -> int:
        """Number of the group among all that the engine ever began."""
        return self.states[0].arrival

    @property
    def priority(self) -> int:
        """That of the most urgent request it ever had; a sequence that had ended by then did not hear of it."""
        return min(state.priority for state in self.states)

    @property
    def unfinished(self) -> tuple[State, ...]:
        """Sequences still to be run."""
        return tuple(state for state in self.states if not state.is_finished)

    @property
    def is_complete(self) -> bool:
        """Whether no sequence is still to be run. Asked after each that ends, it looks at each once, about."""
        while self._num_leading_finished < len(self.states):
            if not self.states[self._num_leading_finished].is_finished:
                return False
            self._num_leading_finished += 1
        return True

    def timings_now(self) -> RequestTimings:
        """How far it got, and that it ends now."""
        scheduled = [state.scheduled_s for state in self.states if state.scheduled_s is not None]
        first_tokens = [state.first_token_s for state in self.states if state.first_token_s is not None]
        return RequestTimings(
            self.states[0].arrived_s, min(scheduled, default=None), min(first_tokens, default=None), time.monotonic()
        )

    def request_named(self, request_id: str) -> Asked:
        """The one of its requests that has this id."""
        return next(request for request in self.requests if request.request_id == request_id)

    def parted(self, error: EngineError | None) -> tuple[list[Asked], list[Asked]]:
        """The requests that end as the group did, and those that are tried again without them.

        An error is the first request's own: its equals may fare better, unless what is wrong is what they ask for.
        """
        num_ended = len(self.requests) if error is None or isinstance(error, InvalidRequest) else 1
        return self.requests[:num_ended], self.requests[num_ended:]


Group = TypeVar("Group", bound=SequenceGroup[Any, Any])
