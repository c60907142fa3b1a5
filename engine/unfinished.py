"""Keeps unfinished requests, for tokens or for embeddings, from the queue to the output that each ends in.

The sequences of a request form a group. Equal requests wait for the same group, which is run once.
"""

from __future__ import annotations

import time
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any, Generic, Protocol, TypeVar

from engine.errors import EngineError, InvalidRequest, NonFiniteLogits
from engine.outputs import FinishedRequests
from engine.request import AnyRequest, PromptLogprobs, Request, RequestOutput, RequestTimings
from engine.scheduling.sequence import RequestState, SequenceState, State

KEY_BYTES = 16  # of the digests that tell whether requests are equal

Asked = TypeVar("Asked", bound=AnyRequest)
Queued_contra = TypeVar("Queued_contra", bound=SequenceState, contravariant=True)
Answer = TypeVar("Answer")  # what a step brings for a sequence


@dataclass(slots=True, eq=False)
class SequenceGroup(Generic[Asked, State]):
    """A request's sequences, until the last of them ends, and the equal requests that get the results."""

    requests: list[Asked]  # equal but for id and priority; the first is charged with the work
    states: tuple[State, ...]  # at least one
    key: bytes | None  # the same for equal requests, which may join; None: no request may
    error: EngineError | None = field(default=None, kw_only=True)  # that the group fails with
    _num_leading_finished: int = field(default=0, init=False)  # at least so many of the first sequences have ended

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
        """That of the most urgent request it ever had: only sequences that had ended by then keep another."""
        return min(state.priority for state in self.states)

    @property
    def unfinished(self) -> tuple[State, ...]:
        """Sequences still to be run."""
        return tuple(state for state in self.states if not state.is_finished)

    @property
    def is_complete(self) -> bool:
        """Whether no sequence is still to be run. Cheap to ask after each end: it starts where it stopped last time."""
        while self._num_leading_finished < len(self.states):
            if not self.states[self._num_leading_finished].is_finished:
                return False
            self._num_leading_finished += 1
        return True

    @property
    def num_output_tokens(self) -> int:
        """Tokens generated so far, in all sequences."""
        return sum(len(state.token_ids) - state.num_prompt_tokens for state in self.states)

    def timings_now(self) -> RequestTimings:
        """When it got how far, with now as its end."""
        scheduled = [state.scheduled_s for state in self.states if state.scheduled_s is not None]
        first_tokens = [state.first_token_s for state in self.states if state.first_token_s is not None]
        return RequestTimings(
            self.states[0].arrived_s, min(scheduled, default=None), min(first_tokens, default=None), time.monotonic()
        )

    def request_named(self, request_id: str) -> Asked:
        """Its request of this id."""
        return next(request for request in self.requests if request.request_id == request_id)

    def parted(self) -> tuple[list[Asked], list[Asked]]:
        """The requests that end as the group did, and those that are tried again without them.

        An error ends the first request only, and the equal ones are tried again; all of them end if it is an
        InvalidRequest, for they ask for the same.
        """
        num_ended = len(self.requests) if self.error is None or isinstance(self.error, InvalidRequest) else 1
        return self.requests[:num_ended], self.requests[num_ended:]


Group = TypeVar("Group", bound=SequenceGroup[Any, Any])


@dataclass(slots=True, eq=False, kw_only=True)
class RequestGroup(SequenceGroup[Request, RequestState]):
    """A request's `n` sequences, behind them one for each continuation that it has scored, and the requests that get
    what comes of both.
    """

    base_seed: int  # of the draws: the request's, or drawn for it
    num_resumed_tokens: int = 0  # generated before, in all sequences

    @property
    def answering(self) -> tuple[RequestState, ...]:
        """The `n` sequences, which generate."""
        return self.states[: self.request.params.n]

    @property
    def continuation_logprobs(self) -> tuple[float, ...] | None:
        """The log-probability of each continuation, if all are computed; else None."""
        scored = [state.prompt_logprobs for state in self.states[self.request.params.n :]]
        totals = tuple(entries.total() for entries in scored if entries is not None and entries.is_complete)
        return totals if len(totals) == len(scored) else None

    @property
    def prompt_logprobs(self) -> PromptLogprobs | None:
        """Those of the prompt, where the request asks for them and all are computed; else None."""
        found = (state.prompt_logprobs for state in self.answering if state.prompt_logprobs is not None)
        return next((entries for entries in found if entries.is_complete), None)

    def choose_scorer(self) -> None:
        """Have the prompt scored by a sequence that is to be run: the first may have ended before a resume state."""
        first, unfinished = self.states[0], [state for state in self.answering if not state.is_finished]
        if first.is_finished and unfinished:
            unfinished[0].prompt_logprobs, first.prompt_logprobs = first.prompt_logprobs, None


class GroupTable(Generic[Group]):
    """Finds groups by request, by sequence, and by the key under which equal requests join them."""

    def __init__(self) -> None:
        self._by_id: dict[str, Group] = {}  # by request id
        self._by_arrival: dict[int, Group] = {}
        self._by_key: dict[bytes, Group] = {}

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._by_id

    def __iter__(self) -> Iterator[Group]:
        """All groups in order of arrival; they may be dropped while this runs."""
        return iter(list(self._by_arrival.values()))

    def find(self, request_id: str) -> Group | None:
        """The group of the request of this id; None if it is not unfinished."""
        return self._by_id.get(request_id)

    def of(self, state: SequenceState) -> Group:
        """The group of a sequence."""
        return self._by_arrival[state.arrival]

    def at(self, arrivals: Iterable[int]) -> list[Group]:
        """The groups of these arrival numbers."""
        return [self._by_arrival[arrival] for arrival in arrivals]

    def add(self, group: Group) -> None:
        """Add a new group: later requests of its key may join it."""
        self._by_arrival[group.arrival] = group
        self._by_id.update(dict.fromkeys((request.request_id for request in group.requests), group))
        if group.key is not None:
            self._by_key[group.key] = group

    def join(self, request: AnyRequest, key: bytes | None) -> Group | None:
        """Add a request to the unfinished group of its key; None if there is none."""
        group = None if key is None else self._by_key.get(key)
        if group is not None:
            group.requests.append(request)
            self._by_id[request.request_id] = group
        return group

    def withdraw(self, request: AnyRequest) -> None:
        """Take one of several requests out of its group."""
        group = self._by_id.pop(request.request_id)
        group.requests = [other for other in group.requests if other is not request]

    def drop(self, group: Group) -> None:
        """Forget a group that ended."""
        del self._by_arrival[group.arrival]
        for request in group.requests:
            del self._by_id[request.request_id]
        if group.key is not None:
            del self._by_key[group.key]


class SequenceQueue(Protocol[Queued_contra]):
    """Where sequences wait for their steps: the `Scheduler`, or the queue of an encoder."""

    def add(self, state: Queued_contra) -> None:
        """Queue a new sequence."""

    def promote(self, state: Queued_contra, priority: int) -> None:
        """Make an unfinished sequence more urgent."""

    def finish(self, state: Queued_contra, *, kv_is_good: bool = True) -> None:
        """Take out an unfinished sequence and free what it holds."""


class UnfinishedRequests(ABC, Generic[Asked, State, Group, Answer]):
    """Queues the sequences of requests, takes what steps answer for them, and hands out what the requests end in.

    This is the part that requests for tokens and for embeddings have in common. A request that is to get the same as an
    unfinished one of its tenant joins that one's group, and the work goes on as long as one of them is left.
    """

    def __init__(self, queue: SequenceQueue[State], finished: FinishedRequests, *, shares_kv: bool = True) -> None:
        """`shares_kv`: other sequences may use the KV of one that ended."""
        self._queue = queue
        self._finished = finished
        self._shares_kv = shares_kv
        self._groups: GroupTable[Group] = GroupTable()

    def __contains__(self, request_id: object) -> bool:
        """Whether a request of this id is unfinished."""
        return request_id in self._groups

    def take(self, state: State, answer: Answer | EngineError | None) -> None:
        """Take what a step brought for a sequence: an answer, an error, which its request fails with, or nothing yet.

        Nothing is taken for a sequence that has ended, as when another of its request failed in the same step.
        """
        if answer is None or state.is_finished:
            return
        if isinstance(answer, EngineError):
            self._fail(state, answer)
            return
        if self._apply(state, answer):
            self._queue.finish(state, kv_is_good=self._shares_kv)
            self._hand_out_if_complete(self._groups.of(state))

    def abort(self, request_id: str) -> bool:
        """End a request as it stands; False for one that is not unfinished. Equal requests keep the work."""
        group = self._groups.find(request_id)
        if group is None:
            return False
        if len(group.requests) > 1:
            request = group.request_named(request_id)
            self._hand_out(self._ended_copy(request, group), [request])
            self._groups.withdraw(request)
        else:
            self._cancel(group)
        return True

    def close(self) -> None:
        """Abort all of them."""
        for group in self._groups:
            self._cancel(group)

    @abstractmethod
    def _apply(self, state: State, answer: Answer) -> bool:
        """Add an answer to its sequence; True if that ends it."""

    @abstractmethod
    def _end(self, state: State) -> None:
        """Mark a sequence as ended before its time."""

    @abstractmethod
    def _output(self, group: Group) -> RequestOutput:
        """The output of the first request of a group that has ended."""

    @abstractmethod
    def _ended_copy(self, request: Asked, group: Group) -> Group:
        """A group for one of several requests, ended at the point that their group has reached."""

    @abstractmethod
    def _begin_again(self, group: Group, requests: list[Asked]) -> Group:
        """A new group for requests of one that failed."""

    def _join(self, request: Asked, key: bytes | None) -> bool:
        """Add a request to the unfinished group of its key, if there is one; False if there is none."""
        group = self._groups.join(request, key)
        if group is not None and request.priority < group.priority:
            self._promote(group, request.priority)
        return group is not None

    def _start(self, group: Group) -> None:
        self._groups.add(group)
        self._enqueue(group)

    def _enqueue(self, group: Group) -> None:
        for state in group.unfinished:
            self._queue.add(state)
        self._hand_out_if_complete(group)

    def _promote(self, group: Group, priority: int) -> None:
        for state in group.unfinished:
            self._queue.promote(state, priority)

    def _dequeue(self, group: Group) -> None:
        for state in group.unfinished:
            self._queue.finish(state, kv_is_good=self._shares_kv)

    def _fail(self, state: State, error: EngineError) -> None:
        """Fail the request of a sequence that failed. Nobody else may use its KV if that is not finite."""
        group = self._groups.of(state)
        group.error = error
        self._queue.finish(state, kv_is_good=self._shares_kv and not isinstance(error, NonFiniteLogits))
        self._end(state)
        self._cancel(group)

    def _cancel(self, group: Group) -> None:
        """End a group as it stands."""
        self._dequeue(group)
        for state in group.unfinished:
            self._end(state)
        self._hand_out_if_complete(group)

    def _hand_out_if_complete(self, group: Group) -> None:
        if not group.is_complete:
            return
        self._groups.drop(group)
        ended, others = group.parted()
        self._hand_out(group, ended)
        if others:
            again, priority = self._begin_again(group, others), group.priority
            for state in again.states:
                state.priority, state.arrived_s = priority, group.states[0].arrived_s
            self._start(again)

    def _hand_out(self, group: Group, requests: list[Asked]) -> None:
        """Only the group's first request is charged with the work: for others all of the prompt counts as cached."""
        output, num_output_tokens = self._output(group), group.num_output_tokens
        num_cached_tokens = output.num_prompt_tokens
        for request in requests:
            is_duplicate = request is not group.request
            if is_duplicate:
                request_id = request.request_id
                output = replace(output, request_id=request_id, num_cached_tokens=num_cached_tokens, timings=None)
            self._finished.add(output, num_output_tokens=num_output_tokens, is_duplicate=is_duplicate)
