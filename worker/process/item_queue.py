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
    """A queue of items that came together: more go in while fewer than `max_items` of less than `max_bytes` wait.

    Its size is the number of items, or `max_items` if their bytes fill it. The methods below are those that queue.Queue
    has for subclasses to replace; it calls them under its lock.
    """

    def __init__(self, max_items: int, max_bytes: int) -> None:
        super().__init__(max_items)
        self._max_bytes = max_bytes

    @property
    def waiting(self) -> tuple[int, int]:
        """How many items wait, and their bytes."""
        return self._num_items, self._num_bytes

    def _init(self, maxsize: int) -> None:
        self._waiting: deque[Together] = deque()
        self._num_items = self._num_bytes = 0

    def _qsize(self) -> int:
        return self._num_items if self._num_bytes < self._max_bytes else max(self._num_items, self.maxsize)

    def _put(self, item: Together) -> None:
        self._waiting.append(item)
        self._num_items += len(item[1])
        self._num_bytes += _num_bytes(item)

    def _get(self) -> Together:
        item = self._waiting.popleft()
        self._num_items -= len(item[1])
        self._num_bytes -= _num_bytes(item)
        return item


def _num_bytes(together: Together) -> int:
    return sum(item.num_bytes for item in together[1])
