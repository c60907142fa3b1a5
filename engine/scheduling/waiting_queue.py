"""Sequences that hold no blocks yet."""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Iterator
from typing import Generic

from engine.scheduling.prefix_sweep import BlockedAt
from engine.scheduling.priority_tier import PriorityTier
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.sequence_state import State


class WaitingQueue(Generic[State]):
    """Sequences in the order they are to be admitted, right for whatever it holds at the moment.

    Strictly by priority; within one, a fair share of the tokens for each tenant (PriorityTier); within a tenant, depth
    first over the tree of prefixes (PrefixSweep). In which order sequences were added decides nothing else: whoever
    feeds the queue chooses who is in it. To profit from the order, requests that are to run together must have the same
    priority.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._tiers: dict[int, PriorityTier[State]] = {}  # those that hold somebody
        self._priorities: list[int] = []  # their keys, the most urgent first

    def __len__(self) -> int:
        return sum(map(len, self._tiers.values()))

    def __iter__(self) -> Iterator[State]:
        """All of them, in no order."""
        return (state for tier in self._tiers.values() for state in tier)

    def add(self, state: State) -> None:
        """Put a new sequence, or one that was preempted, at its place."""
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
        """Tokens of this sequence are run, on its tenant's account; there is none at a priority where nobody waits."""
        tier = self._tiers.get(state.priority)
        if tier is not None:
            tier.charge(state.request.tenant, num_tokens)

    def candidates(self, blocked_at: BlockedAt[State]) -> Iterator[State]:
        """Sequences in the order in which they are to be admitted, without those `blocked_at` some block.

        The one handed out may be admitted, and tokens charged, before the next is asked for; else nothing may change.
        """
        for priority in tuple(self._priorities):
            yield from self._tiers[priority].candidates(blocked_at)

    def _drop_if_empty(self, priority: int) -> None:
        if not self._tiers[priority]:
            del self._tiers[priority]
            del self._priorities[bisect_left(self._priorities, priority)]
