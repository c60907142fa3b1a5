"""The unfinished groups of one kind of request."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from typing import Generic

from engine.any_request import AnyRequest
from engine.scheduling.sequence_group import Group
from engine.scheduling.sequence_state import SequenceState


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
