"""The sequences of one request as a group, and the table of unfinished groups.

Several equal requests may wait for the same group.
"""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any, Generic, TypeVar

from engine.errors import EngineError, InvalidRequest
from engine.request import AnyRequest, PromptLogprobs, Request, RequestTimings
from engine.scheduling.sequence import RequestState, SequenceState, State

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
        """Have the prompt scored by a sequence that is to be run: the first may have ended before a resume state."""
        first, unfinished = self.states[0], self.unfinished
        if first.is_finished and unfinished:
            unfinished[0].prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, None


class GroupTable(Generic[Group]):
    """Finds groups by request, by sequence, and by the key under which equal requests join them.

    One digest for each group that may be joined is kept.
    """

    def __init__(self) -> None:
        self._by_id: dict[str, Group] = {}  # by the ids of their requests
        self._by_arrival: dict[int, Group] = {}
        self._by_key: dict[bytes, Group] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Group]:
        """In order of arrival; they may end meanwhile."""
        return iter(list(self._by_arrival.values()))

    def find(self, request_id: str) -> Group | None:
        """The group that the request of this id waits for."""
        return self._by_id.get(request_id)

    def of(self, state: SequenceState) -> Group:
        """The group of a sequence."""
        return self._by_arrival[state.arrival]

    def at(self, arrivals: Iterable[int]) -> list[Group]:
        """The groups of these numbers."""
        return [self._by_arrival[arrival] for arrival in arrivals]

    def add(self, group: Group) -> None:
        """A group began: later requests of its key may join it."""
        self._by_arrival[group.arrival] = group
        self._by_id.update(dict.fromkeys((request.request_id for request in group.requests), group))
        if group.key is not None:
            self._by_key[group.key] = group

    def join(self, request: AnyRequest, key: bytes | None) -> Group | None:
        """Have a request wait for the unfinished group of its key; None if there is none."""
        group = None if key is None else self._by_key.get(key)
        if group is not None:
            group.requests.append(request)
            self._by_id[request.request_id] = group
        return group

    def withdraw(self, request: AnyRequest) -> None:
        """One of several requests waits for its group no more."""
        group = self._by_id.pop(request.request_id)
        group.requests = [other for other in group.requests if other is not request]

    def drop(self, group: Group) -> None:
        """A group ended."""
        del self._by_arrival[group.arrival]
        for request in group.requests:
            del self._by_id[request.request_id]
        if group.key is not None:
            del self._by_key[group.key]
