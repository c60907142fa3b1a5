"""Plans each step: which sequences run, how many tokens of each, and which is preempted when blocks run out."""

from __future__ import annotations

import time
from bisect import insort
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from engine.errors import EngineFatal, KVPoolExhausted
from engine.kv_cache.block_manager import BlockManager
from engine.scheduling.sequence import MOST_DRAFTED, SequenceState
from engine.scheduling.waiting_queue import SchedulerLimits, WaitingQueue
from settings.engine import SpeculationSettings


class Scheduler:
    """Continuous batching with chunked prefill.

    The token budget of a step goes to one token for each decoding sequence, then to the next chunk of each sequence in
    prefill, then to admissions in the order of the WaitingQueue. A decode that finds no block preempts the sequence
    last in rank (the least urgent, and of these the one admitted last), which gives back its blocks and is recomputed
    later. The items of a step are listed by length, not by rank.

    A sequence is in exactly one place: waiting (with no blocks) or running (with blocks for all its known tokens). It
    leaves when the engine calls `finish`.

    One step may be scheduled ahead, while the one before it runs. The tokens which that one chooses are pending: they
    are scheduled by their position. Blocks are offered to the prefix cache only once their step has proved good.
    """

    def __init__(
        self, limits: SchedulerLimits, block_manager: BlockManager, speculation: SpeculationSettings | None = None
    ) -> None:
        """speculation: None: nothing is drafted. Drafts do not go with steps that are scheduled ahead."""
        self._limits = limits
        self._blocks = block_manager
        self._speculation = speculation if speculation is not None and speculation.enabled else None
        self._waiting: WaitingQueue[SequenceState] = WaitingQueue(limits)
        self._running: list[SequenceState] = []  # in rank order
        self._num_admitted = 0
        self.num_preemptions = 0
        self.num_drafted_tokens = self.num_accepted_tokens = 0

    @property
    def running(self) -> Sequence[SequenceState]:
        """Sequences that hold blocks, in rank order."""
        return self._running

    @property
    def waiting(self) -> WaitingQueue[SequenceState]:
        """Sequences that hold none."""
        return self._waiting

    @property
    def has_work(self) -> bool:
        """Whether any sequence is unfinished."""
        return bool(self._running) or len(self._waiting) > 0

    def add(self, state: SequenceState) -> None:
        """Queue a new sequence: cached blocks that it will need are evicted last."""
        self._blocks.want(state.chain)
        self._waiting.add(state)

    def promote(self, state: SequenceState, priority: int) -> None:
        """Make an unfinished sequence more urgent."""
        if state in self._running:
            self._running.remove(state)
            state.priority = priority
            insort(self._running, state, key=_rank)
        else:
            self._waiting.remove(state)
            state.priority = priority
            self._waiting.add(state)

    def schedule(self, *, is_ahead: bool = False) -> ScheduledBatch | None:
        """Plan the next step and allocate what it needs; None when there is nothing to run.

        is_ahead: the step before is under way. None too if its answers are needed first: a sequence cannot go on
        without them, or one would have to be preempted, which may be unnecessary once another has ended.
        """
        if not self.has_work or (is_ahead and not self._can_run_ahead()):
            return None
        items = self._schedule_mixed() if self._limits.unified_prefill else self._schedule_one_phase()
        if self._speculation is not None and not is_ahead:
            items = self._with_drafts(items, self._speculation)
        if not items and is_ahead:
            return None
        if not items:
            raise EngineFatal(
                f"nothing can run: {len(self._running)} running, {len(self._waiting)} waiting, "
                f"{self._blocks.num_free_blocks} of {self._blocks.num_blocks} KV blocks free"
            )
        # Attention begins rows with one query in this order, so that the longest is not left to run on alone.
        items.sort(key=_num_keys_of_row, reverse=True)
        return ScheduledBatch(tuple(items))

    def commit(self, items: Iterable[ScheduledItem]) -> None:
        """These ran and their KV is good: offer their full blocks to later hits. Their tokens are no longer pending.

        Of an item with drafts, num_scheduled_tokens are those that were verified. Sequences that ended meanwhile have
        no blocks and are left out.
        """
        block_size = self._blocks.block_size
        for state, start, count, samples, drafted in items:
            if not state.is_finished:
                state.num_pending_tokens -= samples
                if drafted:
                    self._note_verified(state, start, count, drafted)
                if start % block_size + count >= block_size:  # the end of a block is among them
                    known = [*state.token_ids, *drafted[: count - 1]] if drafted else state.token_ids
                    self._blocks.commit(state.sequence_id, known, start + count)
                    self._blocks.release_unseen(state.sequence_id, start + count)

    def _note_verified(self, state: SequenceState, start: int, count: int, drafted: Sequence[int]) -> None:
        """Of the last token and its drafts `count` are in KV for good; what lies behind them will be written again.

        The next draft is at most twice as long and one more. After 0, where a draft made the values of them all no
        numbers, there is none.
        """
        state.num_computed_tokens = start + count
        state.max_drafted = min(MOST_DRAFTED, 2 * count - 1) if count else 0
        self.num_drafted_tokens += len(drafted)
        self.num_accepted_tokens += max(0, count - 1)

    def _with_drafts(self, items: list[ScheduledItem], speculation: SpeculationSettings) -> list[ScheduledItem]:
        """The items, with drafts where a sequence's last tokens occurred before, as far as tokens are left in the step.

        Rows of logits stay below max_num_seqs, for which memory was measured, and blocks are taken for drafts only
        while each running sequence could still take one.
        """
        budget = self._limits.max_num_batched_tokens - sum(item.num_scheduled_tokens for item in items)
        budget = min(budget, self._limits.max_num_seqs - len(items))
        found: list[ScheduledItem] = []
        for item in items:
            state = item.state
            drafted: tuple[int, ...] = ()
            most = min(budget, state.max_drafted, speculation.max_draft_tokens, state.num_draftable_tokens)
            if item.samples and item.num_scheduled_tokens == 1 and most > 0:
                drafted = self._with_room(state, look_up(state, speculation, most))
            budget -= len(drafted)
            count = item.num_scheduled_tokens + len(drafted)
            found.append(item._replace(num_scheduled_tokens=count, drafted=drafted) if drafted else item)
        return found

    def _with_room(self, state: SequenceState, drafted: tuple[int, ...]) -> tuple[int, ...]:
        """As many of the drafts as there are blocks for."""
        num_known = len(state.token_ids)
        missing = self._blocks.missing_blocks(state.sequence_id, num_known + len(drafted))
        if missing and missing + len(self._running) > self._blocks.num_free_blocks:
            return drafted[: -num_known % self._blocks.block_size]
        self._blocks.grow(state.sequence_id, num_known + len(drafted))
        return drafted

    def finish(self, state: SequenceState, *, kv_is_good: bool = True) -> None:
        """Take out an unfinished sequence and free its blocks at once."""
        if state in self._running:
            self._running.remove(state)
        else:
            self._waiting.remove(state)
            self._blocks.unwant(state.chain)
        if kv_is_good:
            self._blocks.free(state.sequence_id)
        else:
            self._blocks.discard(state.sequence_id)

    def check_integrity(self) -> None:
        """Raise EngineFatal unless the account of the blocks, and of the sequences that want them, adds up.

        O(num_blocks).
        """
        self._blocks.check_integrity(state.chain for state in self._waiting)

    def _can_run_ahead(self) -> bool:
        if any(state.needs_answer for state in self._running):
            return False
        num_free = self._blocks.num_free_blocks
        if num_free >= len(self._running):  # a decode takes a block at most
            return True
        decodes = (state for state in self._running if state.num_uncomputed_tokens == 1)
        needs = (self._blocks.missing_blocks(state.sequence_id, state.num_computed_tokens + 1) for state in decodes)
        return sum(needs) <= num_free

    def _schedule_mixed(self) -> list[ScheduledItem]:
        preempted_before = self.num_preemptions
        items, others = self._schedule_decodes()
        budget = self._limits.max_num_batched_tokens - len(items)
        items += self._schedule_prefills(others, budget, may_admit=self.num_preemptions == preempted_before)
        return items

    def _schedule_one_phase(self) -> list[ScheduledItem]:
        """Prefill before decode: a sequence that decodes sooner fills later batches."""
        prefills = self._schedule_prefills(self._running, self._limits.max_num_batched_tokens, may_admit=True)
        return prefills or self._schedule_decodes()[0]

    def _schedule_decodes(self) -> tuple[list[ScheduledItem], list[SequenceState]]:
        """A token of each sequence that decodes; and the others that it came by, none of which was preempted."""
        items: list[ScheduledItem] = []
        others: list[SequenceState] = []
        block_size, is_charged = self._blocks.block_size, len(self._waiting) > 0
        for state in self._running:  # may lose its last ones on the way, which are not come to then
            if len(items) == self._limits.max_num_batched_tokens:
                break
            if state.num_uncomputed_tokens != 1:
                others.append(state)
                continue
            start = state.num_computed_tokens
            if start % block_size == 0 and not self._grow_or_preempt(state):
                break  # it was last in rank itself: all after it have been preempted already
            if is_charged:
                self._waiting.charge(state, 1)
            state.num_computed_tokens = start + 1
            state.num_pending_tokens += 1
            items.append(ScheduledItem(state, start, 1, True))
        return items, others

    def _grow_or_preempt(self, state: SequenceState) -> bool:
        """Make room for a decoding sequence's next token at the cost of those after it; False: it was preempted."""
        while True:
            try:
                self._blocks.grow(state.sequence_id, state.num_computed_tokens + 1)
            except KVPoolExhausted:
                victim = self._running[-1]
                self._preempt(victim)
                if victim is state:
                    return False
            else:
                return True

    def _preempt(self, state: SequenceState) -> None:
        self._running.remove(state)
        self._blocks.free(state.sequence_id)
        state.num_computed_tokens = 0
        state.num_preemptions += 1
        self.num_preemptions += 1
        self.add(state)

    def _schedule_prefills(
        self, states: Iterable[SequenceState], budget: int, *, may_admit: bool
    ) -> list[ScheduledItem]:
        """The next chunk of those of `states` that are in prefill, then admissions."""
        items: list[ScheduledItem] = []
        for state in states:
            if budget == 0:
                return items
            if state.num_uncomputed_tokens > 1:
                items.append(self._item(state, budget))
                budget -= items[-1].num_scheduled_tokens
        if may_admit:
            items += self._admit(budget)
        return items

    def _item(self, state: SequenceState, budget: int) -> ScheduledItem:
        """Schedule as many of its tokens as the budget allows, and charge its tenant at once, before the next
        admission.
        """
        num_uncomputed, start = state.num_uncomputed_tokens, state.num_computed_tokens
        count = min(num_uncomputed, budget)
        samples = count == num_uncomputed
        self._waiting.charge(state, count)
        state.num_computed_tokens = start + count
        state.num_pending_tokens += samples
        return ScheduledItem(state, start, count, samples)

    def _blocked_at(self, state: SequenceState) -> int | None:
        return self._blocks.pending_block(state.chain, state.token_ids, state.max_cached_tokens)

    def _admit(self, budget: int) -> list[ScheduledItem]:
        """Admit in queue order, except sequences whose next block another one is computing right now.

        Stops at the first that finds no room: those after it must not take the blocks that it waits for.
        """
        items: list[ScheduledItem] = []
        if budget == 0 or len(self._running) >= self._limits.max_num_seqs:
            return items
        for state in self._waiting.candidates(self._blocked_at):
            if not self._open(state):
                break
            items.append(self._item(state, budget))
            budget -= items[-1].num_scheduled_tokens
            if budget == 0 or len(self._running) >= self._limits.max_num_seqs:
                break
        return items

    def _has_headroom(self, state: SequenceState) -> bool:
        """Whether a preempted sequence may come back: only if each running one can still take a block, no ping-pong."""
        need = self._blocks.blocks_needed(state.chain, state.token_ids, state.max_cached_tokens)
        return not self._running or need + len(self._running) <= self._blocks.num_free_blocks

    def _open(self, state: SequenceState) -> bool:
        """Give a waiting sequence its blocks and make it run; False, and no change, if there are too few."""
        if state.num_preemptions and not self._has_headroom(state):
            return False
        try:
            state.num_computed_tokens = self._blocks.open(
                state.sequence_id, state.chain, state.token_ids, state.max_cached_tokens
            )
        except KVPoolExhausted:
            return False
        self._waiting.admit(state)
        self._blocks.unwant(state.chain)
        if state.admission is None:
            self._num_admitted += 1
            state.admission = self._num_admitted
            state.scheduled_s = time.monotonic()
            # A resumed sequence may find tokens of its output in the cache as well.
            state.num_cached_tokens = min(state.num_computed_tokens, state.num_prompt_tokens)
        insort(self._running, state, key=_rank)
        return True


def look_up(state: SequenceState, speculation: SpeculationSettings, count: int) -> tuple[int, ...]:
    """The `count` tokens that followed where the sequence's last tokens occurred last before, most of them first; none
    where they did not. A continuation that reaches the end goes on with itself.

    Tokens are kept as the characters of a string: it is searched backwards in C (some 2 us for 1,000 tokens).
    """
    new = state.token_ids[len(state.looked_up) :]
    text = state.looked_up = state.looked_up + "".join(map(chr, new))
    for length in range(min(speculation.ngram_max, len(text) - 1), speculation.ngram_min - 1, -1):
        place = text.rfind(text[-length:], 0, len(text) - 1)
        if place >= 0:
            following = text[place + length :]
            repeats = -(-count // len(following))
            return tuple(map(ord, (following * repeats)[:count]))
    return ()


def _rank(state: SequenceState) -> tuple[int, int]:
    return state.rank


def _num_keys_of_row(item: ScheduledItem) -> int:
    """Of an item with one query; 0 of a chunk."""
    return item.start + 1 if item.num_scheduled_tokens == 1 else 0


class ScheduledItem(NamedTuple):
    """One sequence's share of a step: tokens `start .. start + num_scheduled_tokens` are run.

    A tuple: it is made for each sequence of each step.
    """

    state: SequenceState
    start: int  # = num_computed_tokens before the step; len(state.token_ids) if its token is pending
    num_scheduled_tokens: int  # >= 1
    samples: bool  # the last token so far is among them: its logits give the next one
    drafted: tuple[int, ...] = ()  # the last of the tokens: guessed, and verified by the step


@dataclass(frozen=True, slots=True)
class ScheduledBatch:
    """What one step runs; without tensors."""

    # Not empty; each sequence at most once. Those with one token, the longest first (equal ones by rank), then chunks.
    items: tuple[ScheduledItem, ...]

    @property
    def num_tokens(self) -> int:
        """Tokens the step runs."""
        return sum(item.num_scheduled_tokens for item in self.items)
