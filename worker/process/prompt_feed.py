"""One shard's prompts on their way into the engine."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Sequence

from engine.request import AnyRequest, RequestOutput, TokenCheckpoint
from worker.lines.prefix_order import PrefixKey

OnOutputs = Callable[[list[RequestOutput]], None]
OnCheckpoint = Callable[[str, TokenCheckpoint], None]  # request id, how far it has come

# Prompts left at which more are to be read: a feed that runs dry holds up, or misses, the sweep over the prefixes.
LOW_WATER = 16


class PromptFeed:
    """The next prompts of one shard, in prefix order, of which an AdmissionWindow takes one after the other.

    Belongs to the lock of the EngineThread it is given to, which also calls the callbacks: they may only put things
    somewhere.
    """

    def __init__(
        self,
        tenant: str,
        priority: int,
        *,
        on_outputs: OnOutputs,
        on_checkpoint: OnCheckpoint = lambda _, __: None,
        on_low: Callable[[], None] = lambda: None,
    ) -> None:
        self.tenant = tenant
        self.priority = priority  # 0 first .. 9 last
        self.on_outputs = on_outputs  # gets the one output of each request, those of one step together
        self.on_checkpoint = on_checkpoint  # how far a request is, every now and then before that
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
        """Whether prompts wait or, the first of them once offered, are about to."""
        return bool(self._waiting) or (bool(self._next_key) and not self._is_all_in)

    @property
    def next_key(self) -> PrefixKey:
        """Where the next prompt sorts, or, while none waits, a lower bound of that; () before the first."""
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
