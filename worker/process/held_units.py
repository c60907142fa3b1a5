"""All units this process holds."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import replace

from worker.process.held_unit import HeldUnit
from worker.registry.claim import Claim
from worker.registry.stop_reason import StopReason
from worker.registry.unit_ref import UnitRef
from worker.tracing.tracing import Tracing


class HeldUnits:
    """The units this process holds a lease on. Thread-safe."""

    def __init__(
        self,
        tracing: Tracing | None = None,
        *,
        on_held: Callable[[HeldUnit], None] = lambda _: None,
        on_removed: Callable[[HeldUnit], None] = lambda _: None,
    ) -> None:
        self._tracing = tracing or Tracing()
        self._on_held = on_held
        self._on_removed = on_removed
        self._changed = threading.Condition()
        self._held: dict[UnitRef, HeldUnit] = {}
        self._stopped: dict[str, StopReason] = {}  # by message: those of which a unit may be on its way from Redis

    def __len__(self) -> int:
        return len(self._held)

    def __contains__(self, ref: UnitRef) -> bool:
        with self._changed:
            return ref in self._held

    def hold(self, claim: Claim, *, message_id: str) -> HeldUnit:
        """A unit was claimed on this Celery message: its span begins, and what it brings about belongs to that."""
        span = self._tracing.hold(claim)
        held = HeldUnit(replace(claim, traceparent=span.traceparent), message_id=message_id, span=span)
        with self._changed:
            self._held[claim.ref] = held
            reason = self._stopped.pop(message_id, None)
        self._on_held(held)
        if reason is not None:
            held.stop(reason)
        return held

    def remove(self, held: HeldUnit) -> None:
        """Its owner is done with it."""
        with self._changed:
            if self._held.get(held.claim.ref) is held:
                del self._held[held.claim.ref]
            self._changed.notify_all()
        self._on_removed(held)

    def all(self) -> list[HeldUnit]:
        """The units at this moment."""
        with self._changed:
            return list(self._held.values())

    def stop_all(self, reason: StopReason) -> None:
        """Tell every owner to stop."""
        for held in self.all():
            held.stop(reason)

    def stop_message(self, message_id: str, reason: StopReason) -> None:
        """Tell the owner of a Celery message's unit to stop; if that is still being claimed, as soon as it is held."""
        with self._changed:
            found = [held for held in self._held.values() if held.message_id == message_id]
            if not found:
                self._stopped[message_id] = reason
        for held in found:
            held.stop(reason)

    def wait_empty(self, timeout_s: float) -> bool:
        """Wait until nothing is held; False if that takes longer."""
        with self._changed:
            return self._changed.wait_for(lambda: not self._held, timeout=timeout_s)
