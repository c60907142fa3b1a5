"""Records and checkpoints on their way to the writer."""

from __future__ import annotations

import queue
from collections import deque
from collections.abc import Sequence

from worker.process.held_unit import HeldUnit
from worker.registry.prompt_checkpoint import PromptCheckpoint
from worker.registry.prompt_record import PromptRecord

Together = tuple[HeldUnit, Sequence[PromptRecord | PromptCheckpoint]]


class ItemQueue(queue.Queue[Together]):
    """A queue of items that came together, whose size is the number of items: more go in while that is below maxsize.

    These are the methods that queue.Queue has for subclasses to replace; it calls them under its lock.
    """

    def _init(self, maxsize: int) -> None:
        self._waiting: deque[Together] = deque()
        self._num_items = 0

    def _qsize(self) -> int:
        return self._num_items

    def _put(self, item: Together) -> None:
        self._waiting.append(item)
        self._num_items += len(item[1])

    def _get(self) -> Together:
        item = self._waiting.popleft()
        self._num_items -= len(item[1])
        return item
