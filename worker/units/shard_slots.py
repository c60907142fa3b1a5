"""Room for shards in this worker, and whose shard gets it."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from worker.process.held_units import HeldUnits
from worker.registry.shard_queue import ShardQueue
from worker.registry.unit_ref import UnitRef

# One slot in so many is kept for tenants that have no shard here: a shard may run for an hour, and behind one tenant's
# shards in all slots another's would wait for that long.
SLOTS_PER_RESERVED = 8


class ShardSlots:
    """How many shards run in this worker at the same time, and the choice of the next. Thread-safe."""

    def __init__(self, queue: ShardQueue, held_units: HeldUnits, max_shards: int) -> None:
        self._queue = queue
        self._held_units = held_units
        self._num_shared = max_shards - max_shards // SLOTS_PER_RESERVED
        self._slots = threading.BoundedSemaphore(max_shards)
        self._choosing = threading.Lock()

    def take(self, timeout_s: float) -> bool:
        """Have a slot until `give`; False if none is free for so long."""
        return self._slots.acquire(timeout=timeout_s)

    def give(self) -> None:
        """Of who took a slot."""
        self._slots.release()

    @contextmanager
    def choosing(self, timeout_s: float) -> Iterator[bool]:
        """One at a time: whoever chooses must know what the one before has got. False if that takes so long."""
        has_lock = self._choosing.acquire(timeout=timeout_s)
        try:
            yield has_lock
        finally:
            if has_lock:
                self._choosing.release()

    def choose(self, hint: UnitRef) -> UnitRef | None:
        """The shard to claim on a message about `hint`, see ShardQueue.choose. Raises redis.RedisError."""
        held = [unit.claim for unit in self._held_units.all() if not unit.claim.ref.is_plan]
        return self._queue.choose(hint, held, only_new_tenants=len(held) >= self._num_shared)
