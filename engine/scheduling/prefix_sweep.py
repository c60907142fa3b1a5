"""One tenant's waiting sequences, in the order of their prefixes."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Generic

from engine.scheduling.sequence_state import SequenceState, State

BlockedAt = Callable[[State], int | None]  # index of the block that another sequence is computing; None: none

_Place = tuple[list[bytes], int, int]


def _place(state: SequenceState) -> _Place:
    return (state.chain.digests, state.arrival, state.index)


@dataclass(slots=True)
class _Cohort:
    """Those who arrived between two admissions."""

    last_admission: int = 0  # that they can wait for: by then all are gone who were there before them or with them


class PrefixSweep(Generic[State]):
    """Hands out sequences depth first over the prefix tree of those that wait.

    Sorted by the digests of their full blocks, sequences stand as in a walk of that tree, because a digest names a
    whole prefix; the order among siblings is arbitrary, equal prefixes stand in order of arrival, and so do all where
    prefix caching is off. A tree of nodes would say the same with more memory and no C comparisons. Adding and removing
    take O(log n) comparisons and a memmove.

    The sweep goes on behind the last admitted and wraps round. Whoever arrives behind it in a subtree that it has not
    left yet is taken before it leaves (its prefix is still in KV); whoever arrives elsewhere behind it waits for the
    next sweep. Nobody is passed by more than `max_overtakes` later arrivals; where that is reached, the sweep goes on
    from there.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._states: list[State] = []  # by _place
        self._cohorts: OrderedDict[State, _Cohort] = OrderedDict()  # oldest first
        self._cohort = _Cohort()  # that of who arrives now
        self._num_admitted = 0
        self._last: _Place | None = None  # where the sweep is: everybody before it that it met has been admitted
        self._has_passed_over = False

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def add(self, state: State) -> None:
        """Put a sequence at its place. Its chain must not change while it is here."""
        insort(self._states, state, key=_place)
        self._cohort.last_admission = self._num_admitted + len(self._states) + self._max_overtakes
        self._cohorts[state] = self._cohort

    def remove(self, state: State) -> None:
        """Take a sequence out that is not to be admitted."""
        del self._states[bisect_left(self._states, _place(state), key=_place)]
        del self._cohorts[state]

    def admit(self, state: State) -> None:
        """Take out the sequence handed out last: it runs now."""
        self.remove(state)
        self._num_admitted += 1
        self._cohort = _Cohort()
        if not self._has_passed_over:
            self._last = (list(state.chain.digests), state.arrival, state.index)

    def walk(self, blocked_at: BlockedAt[State]) -> Iterator[State]:
        """Sequences in order, without those whose next block another is computing (`blocked_at`).

        The one handed out may be admitted before the next is asked for; else nothing may change. The next walk begins
        with whoever was passed over, so that a group is not left for the time its prefix takes. All who wait for one
        block are passed over in O(log n).
        """
        self._has_passed_over = False
        position, remaining = self._start(), len(self._states)
        while remaining > 0:
            if position == len(self._states):
                position = 0
            state = self._states[position]
            depth = blocked_at(state)
            if depth is None:
                yield state
                remaining -= 1
                if position == len(self._states) or self._states[position] is not state:  # admitted
                    if not self._has_passed_over:
                        position = self._start()
                    continue
                behind = position + 1
            else:
                behind = self._end_of_subtree(position, depth)
                remaining -= behind - position
            self._has_passed_over = True
            position = behind

    def _start(self) -> int:
        if not self._states:
            return 0
        oldest, cohort = next(iter(self._cohorts.items()))
        if self._num_admitted >= cohort.last_admission:
            return bisect_left(self._states, _place(oldest), key=_place)
        if self._last is None:
            return 0
        digests = self._last[0]
        position = bisect_left(self._states, self._last, key=_place)
        ahead = self._num_shared(position, digests) if position < len(self._states) else 0
        behind = self._num_shared(position - 1, digests) if position else 0
        if behind > ahead:  # it arrived in a subtree that the sweep would leave now
            return bisect_left(self._states, digests[:behind], key=lambda state: state.chain.digests)
        return position

    def _num_shared(self, position: int, digests: Sequence[bytes]) -> int:
        """Leading blocks that the sequence there has in common with `digests`. Equal digests mean equal prefixes."""
        others = self._states[position].chain.digests
        return bisect_left(range(min(len(others), len(digests))), True, key=lambda i: others[i] != digests[i])

    def _end_of_subtree(self, position: int, depth: int) -> int:
        """Behind the last sequence that shares block `depth` with the one at `position`."""
        digest = self._states[position].chain.digests[depth]

        def is_behind(state: State) -> bool:
            digests = state.chain.digests
            return len(digests) <= depth or digests[depth] != digest

        return bisect_left(self._states, True, lo=position, key=is_behind)
