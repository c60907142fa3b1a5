"""Which inputs an encoder runs next."""

from __future__ import annotations

import time

from engine.embedding.embedding_state import EmbeddingState
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.waiting_queue import WaitingQueue


class EncoderQueue:
    """Whole sequences up to the token budget of a step, in the order of the WaitingQueue: priority, then tenants.

    An encoder keeps nothing between steps: no blocks, no prefixes, no preemption.
    """

    def __init__(self, limits: SchedulerLimits) -> None:
        self._limits = limits
        self._waiting: WaitingQueue[EmbeddingState] = WaitingQueue(limits)
        self._scheduled: list[EmbeddingState] = []

    @property
    def num_waiting(self) -> int:
        """Sequences that wait."""
        return len(self._waiting)

    @property
    def has_work(self) -> bool:
        """Whether any sequence waits."""
        return self.num_waiting > 0

    def add(self, state: EmbeddingState) -> None:
        """Queue a new sequence."""
        self._waiting.add(state)

    def promote(self, state: EmbeddingState, priority: int) -> None:
        """Make an unfinished sequence more urgent."""
        self._waiting.remove(state)
        state.priority = priority
        self._waiting.add(state)

    def finish(self, state: EmbeddingState, *, kv_is_good: bool = True) -> None:
        """Take out an unfinished sequence; there is no KV."""
        if state not in self._scheduled:
            self._waiting.remove(state)

    def schedule(self) -> list[EmbeddingState]:
        """Take the sequences of the next step out; a sequence longer than the budget gets a step of its own."""
        self._scheduled = []
        now_s = time.monotonic()
        budget = self._limits.max_num_batched_tokens
        for state in self._waiting.candidates(_blocked_at):
            if self._scheduled and len(state.token_ids) > budget:
                break
            self._waiting.admit(state)
            state.scheduled_s = now_s
            self._waiting.charge(state, len(state.token_ids))
            self._scheduled.append(state)
            budget -= len(state.token_ids)
            if budget <= 0 or len(self._scheduled) == self._limits.max_num_seqs:
                break
        return self._scheduled


def _blocked_at(_: EmbeddingState) -> None:
    """Nothing that another sequence computes is waited for."""
