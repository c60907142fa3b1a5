"""Chooses which waiting prompts the engine gets next: by priority, then tenant, then shared prefix."""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable, Collection, Iterator, Sequence
from dataclasses import replace

from engine.request import AnyRequest, PooledRequest, RequestOutput, ResumeState
from worker.lines.request_line import PrefixKey
from worker.requests.step_engine import request_room

# With less than a fourth of the window open the engine gets any prompt there is, lest it run out of work.
ENOUGH_SHARE = 4
OVERTAKES = 4  # windows full of prompts that may overtake a shard of the same tenant and priority

OnOutputs = Callable[[list[RequestOutput]], None]
OnResumeState = Callable[[str, ResumeState], None]  # request id, how far it has come

# With so many prompts left more are to be read: a feed that runs dry holds up the sweep over the prefixes or misses it.
LOW_WATER = 16


class AdmissionWindow:
    """Merges the prompts of all held shards into the engine, which orders those that it holds anew.

    Priority comes first; then the tenant with the fewest tokens in the engine; of a tenant, the prefix (FeedSweep)
    across its jobs and shards. A prompt that is due but still being read is waited for while the engine has enough to
    do.

    Priorities age in two places. One that has waited behind a better one for `ageing_s` for each step between them
    gets a turn of `ageing_s`, in which its prompts go in with the best priority. And a prompt that goes in does not
    overtake, in the engine's strict order, a request that has been there for `ageing_s` for each step between.

    A choice costs O(shards held), 26 us for 16. Where all of them are of one tenant and priority it stands for every
    prompt of the feed that sorts before those of the others: shards cut from one job follow one another. Not
    thread-safe: to be used under the lock of its EngineThread.
    """

    def __init__(self, max_open: int, *, ageing_s: float, clock: Callable[[], float] = time.monotonic) -> None:
        self._max_open = max_open  # sequences; a bound on memory, the others stay with their shards
        self._enough = max(max_open // ENOUGH_SHARE, 1)
        self._ageing_s = ageing_s
        self._clock = clock
        self._sweeps: dict[tuple[int, str], FeedSweep] = {}  # by priority and tenant
        self._open: dict[str, tuple[int, str, int, int]] = {}  # by request id: rank, tenant, tokens, room
        self._room_taken = 0  # by all open requests
        self._open_tokens: dict[str, int] = {}  # by tenant
        self._entered_s: dict[int, dict[str, float]] = {}  # by rank: when each open request went in, oldest first
        self._passed_over_since_s: dict[int, float] = {}  # by priority that waits behind a better one
        self._turn_since_s: dict[int, float] = {}  # by priority whose turn has begun

    @property
    def has_waiting(self) -> bool:
        """Whether there is a prompt to take, though perhaps no room; while nothing is open there is room."""
        return any(sweep.is_ready for sweep in self._sweeps.values())

    def join(self, feed: PromptFeed) -> None:
        """Take prompts from this feed too."""
        self._sweeps.setdefault((feed.priority, feed.tenant), FeedSweep(OVERTAKES * self._max_open)).add(feed)

    def leave(self, feed: PromptFeed) -> None:
        """Take no more from it, and forget the prompts that it has."""
        feed.close()
        sweep = self._sweeps[feed.priority, feed.tenant]
        sweep.remove(feed)
        if not sweep:
            del self._sweeps[feed.priority, feed.tenant]

    def take(self) -> list[tuple[AnyRequest, PromptFeed]]:
        """As many prompts as there is room for, in the order to add them."""
        taken: list[tuple[AnyRequest, PromptFeed]] = []
        while self._room_taken < self._max_open:
            found = self._choose()
            if found is None:
                break
            feed, priority, must_wait = found
            rank, most = self._rank(priority), self._enough if must_wait else self._max_open
            for request in self._sweeps[feed.priority, feed.tenant].take(feed, must_wait=must_wait):
                ranked = request if request.priority == rank else replace(request, priority=rank)
                self._enter(ranked, feed.tenant)
                taken.append((ranked, feed))
                if len(self._sweeps) > 1 or self._room_taken >= most:
                    break
        return taken

    def end(self, request_id: str) -> None:
        """Note that a request that was taken has ended."""
        rank, tenant, tokens, room = self._open.pop(request_id)
        self._room_taken -= room
        self._open_tokens[tenant] -= tokens
        if not self._open_tokens[tenant]:
            del self._open_tokens[tenant]
        del self._entered_s[rank][request_id]
        if not self._entered_s[rank]:
            del self._entered_s[rank]

    def _choose(self) -> tuple[PromptFeed, int, bool] | None:
        """The next prompt's feed, the priority it goes in with, and whether it goes in before its turn, lest the engine
        run out of work; None: nothing waits, or what is due is still being read.
        """
        ready = [group for group, sweep in self._sweeps.items() if sweep.is_ready]
        if not ready:
            return None
        live = [group for group, sweep in self._sweeps.items() if sweep.is_live]
        level, priority = self._level({priority for priority, _ in live})
        due = self._sweeps[self._least_served(live, level)].due()
        if due.num_waiting:
            return due, priority, False
        if self._room_taken >= self._enough:
            return None
        best = min(priority for priority, _ in ready)
        return self._sweeps[self._least_served(ready, best)].due(must_wait=True), best, True

    def _least_served(self, groups: Collection[tuple[int, str]], level: int) -> tuple[int, str]:
        same = [group for group in groups if group[0] == level]
        return min(same, key=lambda group: self._open_tokens.get(group[1], 0))

    def _level(self, priorities: Collection[int]) -> tuple[int, int]:
        """The priority to take from, and the one its prompts go in with."""
        now, best = self._clock(), min(priorities)
        since = {other: self._passed_over_since_s.get(other, now) for other in priorities if other != best}
        self._passed_over_since_s = since
        self._turn_since_s = {other: began for other, began in self._turn_since_s.items() if other in since}
        for other in sorted(since, reverse=True):  # the worst first, as it waits longest
            if now - since[other] < (other - best) * self._ageing_s:
                continue
            # The turn begins when there is room, or it would pass unused while the engine is full.
            if now - self._turn_since_s.setdefault(other, now) < self._ageing_s:
                return other, best
            since[other] = now
            del self._turn_since_s[other]
        return best, best

    def _rank(self, priority: int) -> int:
        """The priority to give the engine, which serves lower numbers first however long others have waited."""
        worse = [rank for rank in self._entered_s if rank > priority]
        now = self._clock()
        for rank in sorted(worse, reverse=True):
            oldest = next(iter(self._entered_s[rank].values()))
            if now - oldest >= (rank - priority) * self._ageing_s:
                return rank
        return priority

    def _enter(self, request: AnyRequest, tenant: str) -> None:
        # At least 1, also for an empty prompt, which the engine will refuse: a tenant is forgotten at 0.
        tokens = max(_num_tokens(request), 1)
        room = request_room(request)
        self._open[request.request_id] = (request.priority, tenant, tokens, room)
        self._room_taken += room
        self._open_tokens[tenant] = self._open_tokens.get(tenant, 0) + tokens
        self._entered_s.setdefault(request.priority, {})[request.request_id] = self._clock()


def _num_tokens(request: AnyRequest) -> int:
    """Tokens of its prompt, those that it may generate, and those of continuations that it has scored."""
    if isinstance(request, PooledRequest):
        return request.num_prompt_tokens
    generated = request.params.n * (request.params.max_tokens or 0)
    return request.num_prompt_tokens + generated + sum(map(len, request.continuations))


class FeedSweep:
    """Merges feeds by the prefix order of their next prompts, so that prompts with one prefix go in together.

    A feed that joins behind the others catches up first: its prompts there must be computed in any case, and from then
    on it shares prefixes with the others. But no feed is overtaken by more than `max_overtakes` prompts: then the sweep
    goes on from its place to the end, and feeds behind wait for that.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        # How many prompts had been taken when each had its last turn, or joined; the longest ago first.
        self._last_turns: dict[PromptFeed, int] = {}
        self._num_taken = 0
        self._from: PrefixKey = ()  # feeds behind this wait

    def __bool__(self) -> bool:
        return bool(self._last_turns)

    @property
    def is_ready(self) -> bool:
        """Whether a prompt can be taken now."""
        return any(feed.num_waiting for feed in self._last_turns)

    @property
    def is_live(self) -> bool:
        """Whether prompts wait or are about to."""
        return any(feed.is_live for feed in self._last_turns)

    def add(self, feed: PromptFeed) -> None:
        """Merge this feed too."""
        self._last_turns[feed] = self._num_taken

    def remove(self, feed: PromptFeed) -> None:
        """Merge it no more. Once more does nothing."""
        self._last_turns.pop(feed, None)

    def due(self, *, must_wait: bool = False) -> PromptFeed:
        """The feed whose prompt is next, of those that are live or, with `must_wait`, that have one waiting.

        Raises ValueError if there is none.
        """
        feeds = [feed for feed in self._last_turns if feed.num_waiting or (feed.is_live and not must_wait)]
        if not self._from and feeds and self._num_taken - self._last_turns[feeds[0]] > self._max_overtakes:
            self._from = feeds[0].next_key
        ahead = [feed for feed in feeds if feed.next_key >= self._from] if self._from else feeds
        if not ahead:
            self._from = ()
        return min(ahead or feeds, key=lambda feed: feed.next_key)

    def take(self, feed: PromptFeed, *, must_wait: bool = False) -> Iterator[AnyRequest]:
        """Take the next prompt of the feed that is due, and those after it as long as the feed stays due.

        `must_wait`: it was due among those that have a prompt waiting.
        """
        del self._last_turns[feed]
        live = {other: turn for other, turn in self._last_turns.items() if other.is_live}
        rivals = [other for other in live if other.num_waiting] if must_wait else list(live)
        # Once the sweep goes on to its end, feeds behind wait for that and none is overtaken anew.
        end = min((other.next_key for other in rivals if other.next_key >= self._from), default=None)
        last = math.inf if self._from else min(live.values(), default=self._num_taken) + self._max_overtakes
        is_due = True
        while is_due:
            key, request = feed.take()
            self._num_taken += 1
            self._last_turns[feed] = self._num_taken
            if self._from:
                self._from = key
            yield request
            is_due = feed.num_waiting > 0 and (end is None or feed.next_key < end) and self._num_taken < last


class PromptFeed:
    """The next prompts of one shard, in prefix order, which an AdmissionWindow takes one after the other.

    To be used under the lock of its EngineThread, which also calls the callbacks: they may only put things somewhere.
    """

    def __init__(
        self,
        tenant: str,
        priority: int,
        *,
        on_outputs: OnOutputs,
        on_resume_state: OnResumeState = lambda _, __: None,
        on_low: Callable[[], None] = lambda: None,
    ) -> None:
        self.tenant = tenant
        self.priority = priority  # 0 first .. 9 last
        self.on_outputs = on_outputs  # gets the output of each request, those of one step together
        self.on_resume_state = on_resume_state  # gets how far a request is, now and then before its output
        self._on_low = on_low  # more prompts are to be offered
        self._waiting: deque[tuple[PrefixKey, AnyRequest]] = deque()
        self._next_key: PrefixKey = ()
        self._is_all_in = False

    @property
    def num_waiting(self) -> int:
        """Prompts that can be taken now. May be asked without the lock."""
        return len(self._waiting)

    @property
    def is_low(self) -> bool:
        """Whether more prompts are to be offered, if there are any."""
        return len(self._waiting) <= LOW_WATER

    @property
    def is_live(self) -> bool:
        """Whether prompts wait or, once some were offered, more will come."""
        return bool(self._waiting) or (bool(self._next_key) and not self._is_all_in)

    @property
    def next_key(self) -> PrefixKey:
        """Where the next prompt sorts; while none waits a lower bound, and () before the first."""
        return self._waiting[0][0] if self._waiting else self._next_key

    def offer(self, prompts: Sequence[tuple[PrefixKey, AnyRequest]], *, is_last: bool) -> None:
        """Add the next prompts, in rising order of their keys; `is_last`: the shard has no more."""
        self._waiting.extend(prompts)
        if prompts:
            self._next_key = prompts[-1][0]
        self._is_all_in = is_last

    def take(self) -> tuple[PrefixKey, AnyRequest]:
        """The next prompt. Raises IndexError if none waits."""
        taken = self._waiting.popleft()
        if len(self._waiting) == LOW_WATER and not self._is_all_in:
            self._on_low()
        return taken

    def close(self) -> None:
        """Forget the prompts that were not taken."""
        self._waiting.clear()
        self._is_all_in = True
