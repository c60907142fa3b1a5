"""The waiting sequences of one priority."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Generic

from engine.scheduling.prefix_sweep import BlockedAt, PrefixSweep
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.sequence_state import State


class PriorityTier(Generic[State]):
    """Divides the machine's tokens among the tenants that have something waiting at this priority.

    The tenant with the fewest tokens run so far goes next, prompt and output weighted alike, and keeps its turn until
    it is `quantum_tokens` ahead: an order that changed the tenant with every admission would run all tenants' prefixes
    side by side. A tenant that had nothing waiting does not save that time up: it begins at the count of the least
    served of those that had. Within a tenant the sweep decides, whichever of its jobs a sequence is of.

    Preempted sequences come before all others, in the order in which they were first admitted.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._preempted: list[State] = []
        self._sweeps: dict[str, PrefixSweep[State]] = {}  # of the tenants that have something waiting
        self._served_tokens: dict[str, int] = {}  # of these, and of others that are ahead of the floor
        self._floor = 0  # tokens of the least served tenant that had something waiting; never falls
        self._turn = ""  # tenant whose turn it is

    def __len__(self) -> int:
        return len(self._preempted) + sum(map(len, self._sweeps.values()))

    def __iter__(self) -> Iterator[State]:
        return chain(self._preempted, *self._sweeps.values())

    def add(self, state: State) -> None:
        """A sequence waits: a new one, or one that was preempted."""
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
        """It waits no more, and is not admitted."""
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
        """Tokens of this tenant's sequences of this priority are run."""
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
        """Forget a tenant with nothing waiting, but for being ahead of the others."""
        if self._sweeps[tenant]:
            return
        self._raise_floor()
        del self._sweeps[tenant]
        served = self._served_tokens.items()
        self._served_tokens = {name: n for name, n in served if name in self._sweeps or n > self._floor}
