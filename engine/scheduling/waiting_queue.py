"""Sequences that hold no blocks yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterable, Iterator

from engine.scheduling.request_state import RequestState


def _rank(state: RequestState) -> tuple[int, int, int]:
    return state.rank


class WaitingQueue:
    """Sequences in the order they are to be admitted: priority, then arrival. A preempted one keeps its place."""

    def __init__(self) -> None:
        self._states: list[RequestState] = []

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[RequestState]:
        return iter(self._states)

    def add(self, state: RequestState) -> None:
        """Insert at its place. O(log n) comparisons."""
        insort(self._states, state, key=_rank)

    def remove_all(self, states: Iterable[RequestState]) -> None:
        """Take out these sequences, which must be in the queue."""
        for state in states:
            del self._states[bisect_left(self._states, state.rank, key=_rank)]
