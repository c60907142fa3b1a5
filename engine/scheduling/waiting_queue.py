"""Orders the sequences that wait: by priority, in equal shares between tenants, shared prefixes side by side."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Generic

from engine.scheduling.sequence import SequenceState, State

BlockedAt = Callable[[State], int | None]  # index of the block that another sequence is computing; None: none

_Place = tuple[list[bytes], int, int]


class WaitingQueue(Generic[State]):
    """Sequences in the order in which they are to be admitted.

    Strictly by priority; within a priority, a fair share of the tokens for each tenant (PriorityTier); within a tenant,
    depth first over the tree of prefixes (PrefixSweep). The order of adding decides nothing else. Requests profit from
    a common prefix only if they have the same priority.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._tiers: dict[int, PriorityTier[State]] = {}  # by priority; none is empty
        self._priorities: list[int] = []  # the keys, the most urgent first

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))

    def __iter__(self) -> Iterator[State]:
        """All sequences, in no order."""
        return (state for tier in self._tiers.values() for state in tier)

    def add(self, state: State) -> None:
        """Add a new sequence, or one that was preempted."""
        priority = state.priority
        tier = self._tiers.get(priority)
        if tier is None:
            tier = self._tiers[priority] = PriorityTier(self._limits)
            insort(self._priorities, priority)
        tier.add(state)

    def remove(self, state: State) -> None:
        """Take out a sequence that is not to be admitted."""
        self._tiers[state.priority].remove(state)
        self._drop_if_empty(state.priority)

    def admit(self, state: State) -> None:
        """Take out the sequence that `candidates` handed out last."""
        self._tiers[state.priority].admit(state)
        self._drop_if_empty(state.priority)

    def charge(self, state: State, num_tokens: int) -> None:
        """Charge a sequence's tenant with tokens that are run; not needed at a priority where no sequence waits."""
        tier = self._tiers.get(state.priority)
        if tier is not None:
            tier.charge(state.request.tenant, num_tokens)

    def candidates(self, blocked_at: BlockedAt[State]) -> Iterator[State]:
        """Sequences in the order in which they are to be admitted, without those `blocked_at` some block.

        The last one may be admitted, and tokens charged, before the next is asked for; nothing else may change.
        """
        for priority in tuple(self._priorities):
            yield from self._tiers[priority].candidates(blocked_at)

    def _drop_if_empty(self, priority: int) -> None:
        if not self._tiers[priority]:
            del self._tiers[priority]
            del self._priorities[bisect_left(self._priorities, priority)]


class PriorityTier(Generic[State]):
    """Divides the machine's tokens among the tenants that have something waiting at this priority.

    The tenant with the fewest tokens run so far goes next, prompt and output counted alike, and keeps its turn until it
    is `quantum_tokens` ahead: with another tenant at every admission, the prefixes of all would run side by side. A
    tenant saves nothing up while it has nothing waiting: it begins at the count of the least served of the others.
    Within a tenant the sweep decides, across its jobs.

    Preempted sequences come before all others, in the order in which they were first admitted.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._preempted: list[State] = []
        self._sweeps: dict[str, PrefixSweep[State]] = {}  # of the tenants that have something waiting
        self._served_tokens: dict[str, int] = {}  # of these tenants, and of others that are ahead of the floor
        self._floor = 0  # tokens of the least served tenant that had something waiting; never falls
        self._turn = ""  # the tenant whose turn it is

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._sweeps.values()))

    def __iter__(self) -> Iterator[State]:
        return chain(self._preempted, *self._sweeps.values())

    def add(self, state: State) -> None:
        """Add a new sequence, or one that was preempted."""
        if state.was_admitted:
            insort(self._preempted, state, key=lambda other: other.rank)
            return
        tenant = state.request.tenant
        sweep = self._sweeps.get(tenant)
        if sweep is None:
            self._raise_floor()
            self._served_tokens[tenant] = max(self._served_tokens.get(tenant, 0), self._floor)
            sweep = self._sweeps[tenant] = PrefixSweep(self._limits.max_overtakes)
        sweep.add(state)

    def remove(self, state: State) -> None:
        """Take out a sequence that is not to be admitted."""
        if state.was_admitted:
            self._preempted.remove(state)
        else:
            self._sweeps[state.request.tenant].remove(state)
            self._drop_if_empty(state.request.tenant)

    def admit(self, state: State) -> None:
        """Take out the sequence handed out last."""
        if state.was_admitted:
            self._preempted.remove(state)
        else:
            self._sweeps[state.request.tenant].admit(state)
            self._drop_if_empty(state.request.tenant)

    def charge(self, tenant: str, num_tokens: int) -> None:
        """Count tokens of this tenant that are run at this priority."""
        self._served_tokens[tenant] = self._served_tokens.get(tenant, self._floor) + num_tokens

    def candidates(self, blocked_at: BlockedAt[State]) -> Iterator[State]:
        """Sequences in the order in which they are to be admitted; see PrefixSweep.walk."""
        for state in tuple(self._preempted):
            if blocked_at(state) is None:
                yield state
        self._raise_floor()
        walks = {tenant: sweep.walk(blocked_at) for tenant, sweep in self._sweeps.items()}
        while walks:
            tenant = self._choose(walks)
            candidate = next(walks[tenant], None)
            if candidate is not None:
                yield candidate
            if candidate is None or tenant not in self._sweeps:
                del walks[tenant]

    def _choose(self, tenants: Mapping[str, object]) -> str:
        least = min(tenants, key=self._served_tokens.__getitem__)
        most = self._served_tokens[least] + self._limits.quantum_tokens
        if self._turn not in tenants or self._served_tokens[self._turn] >= most:
            self._turn = least
        return self._turn

    def _raise_floor(self) -> None:
        least = min((self._served_tokens[tenant] for tenant in self._sweeps), default=0)
        self._floor = max(self._floor, least)

    def _drop_if_empty(self, tenant: str) -> None:
        """Forget a tenant with nothing waiting, except how far it is ahead of the others."""
        if self._sweeps[tenant]:
            return
        self._raise_floor()
        del self._sweeps[tenant]
        served = self._served_tokens.items()
        self._served_tokens = {name: n for name, n in served if name in self._sweeps or n > self._floor}


def _place(state: SequenceState) -> _Place:
    return (state.chain.digests, state.arrival, state.index)


@dataclass(slots=True)
class _Cohort:
    """The sequences that arrived between two admissions."""

    last_admission: int = 0  # number of the admission by which all are gone that were there before them or with them


class PrefixSweep(Generic[State]):
    """Hands out sequences depth first over the prefix tree of those that wait.

    Sorting by the digests of the full blocks gives the order of a walk over that tree, because a digest names a whole
    prefix. The order among siblings is arbitrary; equal prefixes are in order of arrival, and so are all sequences if
    prefix caching is off. A tree of nodes would take more memory and have no comparisons in C. Adding and removing take
    O(log n) comparisons and a memmove.

    The sweep goes on after the sequence admitted last, and wraps round. A sequence that arrives before that place is
    still taken in this sweep if the sweep has not left its subtree (its prefix is still in KV), else in the next. No
    sequence is passed by more than `max_overtakes` later arrivals: at that number the sweep goes on from it.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        self._states: list[State] = []  # by _place
        self._cohorts: OrderedDict[State, _Cohort] = OrderedDict()  # oldest first
        self._cohort = _Cohort()  # of the sequences that arrive now
        self._num_admitted = 0
        self._last: _Place | None = None  # where the sweep is: all that it met before have been admitted
        self._has_passed_over = False

    def __len__(self) -> int:
        return len(self._states)

    def __iter__(self) -> Iterator[State]:
        return iter(self._states)

    def add(self, state: State) -> None:
        """Add a sequence. Its chain must not change while it is here."""
        insort(self._states, state, key=_place)
        self._cohort.last_admission = self._num_admitted + len(self._states) + self._max_overtakes
        self._cohorts[state] = self._cohort

    def remove(self, state: State) -> None:
        """Take a sequence out that is not to be admitted."""
        del self._states[bisect_left(self._states, _place(state), key=_place)]
        del self._cohorts[state]

    def admit(self, state: State) -> None:
        """Take out the sequence handed out last, which runs now."""
        self.remove(state)
        self._num_admitted += 1
        self._cohort = _Cohort()
        if not self._has_passed_over:
            self._last = (list(state.chain.digests), state.arrival, state.index)

    def walk(self, blocked_at: BlockedAt[State]) -> Iterator[State]:
        """Sequences in order, without those whose next block another is computing (`blocked_at`).

        The last one may be admitted before the next is asked for; nothing else may change. The next walk begins with
        those passed over, so that the sweep does not leave a group while its prefix is computed. All sequences that
        wait for one block are passed over in O(log n).
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
        if behind > ahead:  # the one before this place arrived in a subtree that the sweep would leave now
            return bisect_left(self._states, digests[:behind], key=lambda state: state.chain.digests)
        return position

    def _num_shared(self, position: int, digests: Sequence[bytes]) -> int:
        """Leading blocks that the sequence there has in common with `digests`: equal digests mean equal prefixes."""
        others = self._states[position].chain.digests
        return bisect_left(range(min(len(others), len(digests))), True, key=lambda i: others[i] != digests[i])

    def _end_of_subtree(self, position: int, depth: int) -> int:
        """The position after the last sequence that shares block `depth` with the one at `position`."""
        digest = self._states[position].chain.digests[depth]

        def is_behind(state: State) -> bool:
            digests = state.chain.digests
            return len(digests) <= depth or digests[depth] != digest

        return bisect_left(self._states, True, lo=position, key=is_behind)


@dataclass(frozen=True, slots=True)
class SchedulerLimits:
    """What bounds a step. `max_num_batched_tokens >= max_num_seqs`, so that every running sequence can decode."""

    max_num_seqs: int  # sequences that hold blocks
    max_num_batched_tokens: int  # tokens of one step
    unified_prefill: bool  # prefill and decode share a step

    @property
    def max_overtakes(self) -> int:
        """Later arrivals of its tenant that may pass a waiting sequence: two windows of 8 x max_num_seqs, about as many
        as one sweep meets while new ones arrive.
        """
        return 16 * self.max_num_seqs

    @property
    def quantum_tokens(self) -> int:
        """How far a tenant may get ahead before another has its turn; measured in engine/DESIGN.md."""
        return max(self.max_num_batched_tokens // 4, 1)
