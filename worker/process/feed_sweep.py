"""One tenant's feeds of one priority, in the order of their prefixes."""

from __future__ import annotations

from engine.request import AnyRequest
from worker.lines.prefix_order import PrefixKey
from worker.process.prompt_feed import PromptFeed


class FeedSweep:
    """Merges feeds by the prefix order of their next prompts, so that a prefix is in use once and for all of them.

    A feed that comes with prompts behind the others' catches up with them first: whatever it has there must be
    computed again in any case, and from then on it shares what is computed for them. But nobody is passed by more than
    `max_overtakes` prompts: then the sweep goes on from there to the end, and who comes behind it waits that long.
    """

    def __init__(self, max_overtakes: int) -> None:
        self._max_overtakes = max_overtakes
        # Prompts taken when each had its last turn, or came: the longest ago first.
        self._last_turns: dict[PromptFeed, int] = {}
        self._num_taken = 0
        self._from: PrefixKey = ()  # who is behind this waits

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
        """Whose prompt is next, of the feeds that are live or, with `must_wait`, of those of which one waits already.
        Raises ValueError if there is none.
        """
        feeds = [feed for feed in self._last_turns if feed.num_waiting or (feed.is_live and not must_wait)]
        if not self._from and feeds and self._num_taken - self._last_turns[feeds[0]] > self._max_overtakes:
            self._from = feeds[0].next_key
        ahead = [feed for feed in feeds if feed.next_key >= self._from] if self._from else feeds
        if not ahead:
            self._from = ()
        return min(ahead or feeds, key=lambda feed: feed.next_key)

    def take(self, feed: PromptFeed) -> AnyRequest:
        """The next prompt of the feed that is due."""
        key, request = feed.take()
        self._num_taken += 1
        del self._last_turns[feed]
        self._last_turns[feed] = self._num_taken
        if self._from:
            self._from = key
        return request
