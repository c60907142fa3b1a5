"""A unit somebody should look at."""

from __future__ import annotations

from dataclasses import dataclass

from worker.registry.unit_ref import UnitRef


@dataclass(frozen=True, slots=True)
class DueUnit:
    """A unit nobody runs: its message may be lost, its worker dead, or its job cancelled or expired."""

    ref: UnitRef
    priority: int  # its job's, 0 first .. 9 last
    should_close: bool  # write its error records; otherwise announce it again
