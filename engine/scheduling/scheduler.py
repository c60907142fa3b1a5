"""Decides what each step runs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from engine.errors import EngineFatal, KVPoolExhausted
from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.request_state import RequestState
from engine.scheduling.scheduled_batch import ScheduledBatch
from engine.scheduling.scheduled_item import ScheduledItem
from engine.scheduling.scheduler_limits import SchedulerLimits
from engine.scheduling.waiting_queue import WaitingQueue


class Scheduler:
    """Continuous batching with chunked prefill, in this order within the token budget of a step:

    one token for each decoding sequence, the next chunk of each sequence in prefill, then admissions. A decode that
    finds no block preempts the sequence last in rank, which gives back its blocks and is recomputed later.

    A sequence is in exactly one place: waiting (holding no blocks) or running (holding blocks for all its known
    tokens). It leaves by `finish`, called by the engine for whatever reason it ended.
    """

    def __init__(self, limits: SchedulerLimits, block_manager: BlockManager) -> None:
        self._limits = limits
        self._blocks = block_manager
        self._waiting = WaitingQueue()
        self._running: list[RequestState] = []  # in rank order
        self.num_preemptions = 0

    @property
    def running(self) -> Sequence[RequestState]:
        """Sequences that hold blocks, in rank order."""
        return self._running

    @property
    def waiting(self) -> WaitingQueue:
        """Sequences that hold none."""
        return self._waiting

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running) or len(self._waiting) > 0

    def add(self, state: RequestState) -> None:
        """Queue a new sequence."""
        self._waiting.add(state)

    def schedule(self) -> ScheduledBatch | None:
        """Plan the next step and allocate what it needs; None when there is nothing to run."""
        if not self.has_work:
            return None
        items = self._schedule_mixed() if self._limits.unified_prefill else self._schedule_one_phase()
        if not items:
            raise EngineFatal(
                f"nothing can run: {len(self._running)} running, {len(self._waiting)} waiting, "
                f"{self._blocks.num_free_blocks} of {self._blocks.num_blocks} KV blocks free"
            )
        return ScheduledBatch(tuple(items))

    def advance(self, items: Iterable[ScheduledItem]) -> None:
        """These ran and their KV is good: move them on and offer their full blocks to later hits."""
        for item in items:
            state = item.state
            state.num_computed_tokens = item.start + item.num_scheduled_tokens
            self._blocks.commit(state.sequence_id, state.token_ids, state.num_computed_tokens)

    def finish(self, state: RequestState, *, kv_is_good: bool = True) -> None:
        """Take out an unfinished sequence and free its blocks at once."""
        if state in self._running:
            self._running.remove(state)
        else:
            self._waiting.remove_all([state])
        if kv_is_good:
            self._blocks.free(state.sequence_id)
        else:
            self._blocks.discard(state.sequence_id)

    def _schedule_mixed(self) -> list[ScheduledItem]:
        preempted_before = self.num_preemptions
        items = self._schedule_decodes()
        budget = self._limits.max_num_batched_tokens - len(items)
        items += self._schedule_prefills(budget, may_admit=self.num_preemptions == preempted_before)
        return items

    def _schedule_one_phase(self) -> list[ScheduledItem]:
        """Prefill before decode: a sequence that decodes sooner fills later batches."""
        prefills = self._schedule_prefills(self._limits.max_num_batched_tokens, may_admit=True)
        return prefills or self._schedule_decodes()

    def _schedule_decodes(self) -> list[ScheduledItem]:
        items: list[ScheduledItem] = []
        position = 0
        while position < len(self._running) and len(items) < self._limits.max_num_batched_tokens:
            state = self._running[position]
            position += 1
            if state.num_uncomputed_tokens == 1:
                if not self._grow_or_preempt(state):
                    break  # it was last in rank itself: whoever follows has been preempted already
                items.append(ScheduledItem(state, state.num_computed_tokens, 1, samples=True))
        return items

    def _grow_or_preempt(self, state: RequestState) -> bool:
        """Room for all known tokens of a running sequence, at the cost of those behind it; False: it was preempted."""
        while True:
            try:
                self._blocks.grow(state.sequence_id, len(state.token_ids))
            except KVPoolExhausted:
                victim = self._running[-1]
                self._preempt(victim)
                if victim is state:
                    return False
            else:
                return True

    def _preempt(self, state: RequestState) -> None:
        self._running.remove(state)
        self._blocks.free(state.sequence_id)
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self._waiting.add(state)

    def _schedule_prefills(self, budget: int, *, may_admit: bool) -> list[ScheduledItem]:
        items: list[ScheduledItem] = []
        for state in self._running:
            if budget == 0:
                return items
            if state.num_uncomputed_tokens > 1:
                items.append(self._chunk(state, budget))
                budget -= items[-1].num_scheduled_tokens
        if may_admit:
            items += self._admit(budget)
        return items

    def _has_headroom(self, state: RequestState) -> bool:
        """A preempted sequence comes back only where every running one can still take a block: no ping-pong."""
        need = self._blocks.blocks_needed(state.chain, state.token_ids) + len(self._running)
        return not self._running or need <= self._blocks.num_free_blocks

    def _chunk(self, state: RequestState, budget: int) -> ScheduledItem:
        count = min(state.num_uncomputed_tokens, budget)
        return ScheduledItem(state, state.num_computed_tokens, count, samples=count == state.num_uncomputed_tokens)

    def _admit(self, budget: int) -> list[ScheduledItem]:
        """Admit in queue order, passing over those whose next block another sequence is computing right now.

        Stops at the first that finds no room: whoever is behind it must not take what it waits for.
        """
        items: list[ScheduledItem] = []
        admitted: list[RequestState] = []
        for examined, state in enumerate(self._waiting):
            is_full = len(self._running) + len(admitted) >= self._limits.max_num_seqs
            if budget == 0 or is_full or examined >= self._limits.max_examined:
                break
            if self._blocks.waits_for(state.chain, state.token_ids) is not None:
                continue
            if state.num_preemptions and not self._has_headroom(state):
                break
            try:
                cached = self._blocks.open(state.sequence_id, state.chain, state.token_ids)
            except KVPoolExhausted:
                break
            state.num_computed_tokens = cached
            if not state.was_admitted:
                state.was_admitted = True
                # A resumed sequence may find tokens of its output as well.
                state.num_cached_tokens = min(cached, state.num_prompt_tokens)
            admitted.append(state)
            items.append(self._chunk(state, budget))
            budget -= items[-1].num_scheduled_tokens
        self._waiting.remove_all(admitted)
        self._running = sorted([*self._running, *admitted], key=lambda state: state.rank)
        return items
