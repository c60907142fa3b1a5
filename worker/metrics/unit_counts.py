"""What this worker did with units and prompts."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Mapping
from itertools import product

from worker.metrics.catalogue import ATTEMPTS, OUTCOMES, UNIT_ENDS, UNITS
from worker.process.held_unit import HeldUnit
from worker.registry.prompt_record import PromptRecord
from worker.registry.run_mode import RunMode
from worker.registry.stop_reason import StopReason

_ENDS = {
    StopReason.CANCELLED: "cancelled",
    StopReason.EXPIRED: "expired",
    StopReason.SENT_AWAY: "sent_away",
    StopReason.RELEASED: "released",
    StopReason.FAILED: "failed",
    StopReason.ENGINE_FAILED: "engine_failed",
    StopReason.FENCED: "lease_lost",
}
_ENDS_BY_MODE = {RunMode.CANCELLED: "cancelled", RunMode.EXPIRED: "expired"}


class UnitCounts:
    """Counters since this worker started, each with all its labels from the start. Thread-safe."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._prompts = dict.fromkeys(OUTCOMES, 0)
        self._tokens = dict.fromkeys(("prompt", "cached", "output", "resumed", "reasoning"), 0)
        self._attempts = dict.fromkeys(product(UNITS, ATTEMPTS), 0)
        self._ends = dict.fromkeys(product(UNITS, UNIT_ENDS), 0)

    @property
    def prompts(self) -> Mapping[str, int]:
        """Records written, by outcome."""
        return self._prompts.copy()

    @property
    def tokens(self) -> Mapping[str, int]:
        """Of those prompts: prompt, cached, output, resumed, reasoning."""
        return self._tokens.copy()

    @property
    def attempts(self) -> Mapping[tuple[str, str], int]:
        """Units that were held, by kind and attempt."""
        return self._attempts.copy()

    @property
    def ends(self) -> Mapping[tuple[str, str], int]:
        """Units that are held no more, by kind and why."""
        return self._ends.copy()

    def add_attempt(self, held: HeldUnit) -> None:
        """A unit is held."""
        attempt = ATTEMPTS[min(held.claim.attempts, len(ATTEMPTS) - 1)]
        with self._lock:
            self._attempts[_kind(held), attempt] += 1

    def add_records(self, records: Iterable[PromptRecord]) -> None:
        """Records were written."""
        with self._lock:
            for record in records:
                self._prompts[record.outcome.value] += 1
                self._tokens["prompt"] += record.prompt_tokens
                self._tokens["cached"] += record.cached_tokens
                self._tokens["output"] += record.output_tokens
                self._tokens["resumed"] += record.resumed_tokens
                self._tokens["reasoning"] += record.reasoning_tokens

    def add_end(self, held: HeldUnit) -> None:
        """A unit is held no more."""
        with self._lock:
            self._ends[_kind(held), _end(held)] += 1


def _kind(held: HeldUnit) -> str:
    return "plan" if held.claim.ref.is_plan else "shard"


def _end(held: HeldUnit) -> str:
    if held.is_written:
        return "finished"
    if held.stop_reason is not None:
        return _ENDS[held.stop_reason]
    return _ENDS_BY_MODE.get(held.claim.mode, "finished")
