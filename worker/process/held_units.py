"""All units this process holds."""

from __future__ import annotations

import threading

from worker.process.held_unit import HeldUnit
from worker.registry.stop_reason import StopReason
from worker.registry.unit_ref import UnitRef


class HeldUnits:
    """The units this process holds a lease on. Thread-safe."""

    def __init__(self) -> None:
        self._changed = threading.Condition()
        self._held: dict[UnitRef, HeldUnit] = {}

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ref: UnitRef) -> bool:
        with self._changed:
            return ref in self._held

    def add(self, held: HeldUnit) -> None:
        """A unit was claimed."""
        with self._changed:
            self._held[held.claim.ref] = held

    def remove(self, held: HeldUnit) -> None:
        """Its owner is done with it."""
        with self._changed:
            if self._held.get(held.claim.ref) is held:
                del self._held[held.claim.ref]
            self._changed.notify_all()

    def all(self) -> list[HeldUnit]:
        """The units at this moment."""
        with self._changed:
            return list(self._held.values())

    def stop_all(self, reason: StopReason) -> None:
        """Tell every owner to stop."""
        for held in self.all():
            held.stop(reason)

    def stop_message(self, message_id: str, reason: StopReason) -> None:
        """Tell the owner of the unit that came with a Celery message to stop."""
        for held in self.all():
            if held.message_id == message_id:
                held.stop(reason)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is held; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout=timeout_s)
