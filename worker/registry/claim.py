"""A unit that is ours for now."""

from __future__ import annotations

from dataclasses import dataclass

from worker.registry.run_mode import RunMode
from worker.registry.unit_ref import UnitRef


@dataclass(frozen=True, slots=True)
class Claim:
    """A lease on a unit, with what its holder needs to know."""

    ref: UnitRef
    token: str  # fencing token `<n>:<uuid>`: who writes with an older one is refused
    mode: RunMode
    time_left_s: float | None  # until the job's deadline; None: it has none
    attempts: int  # workers that died over it before
    priority: int  # 0 first .. 9 last
    tenant: str
    created_s: int  # Unix time of the job's submission
    num_lines: int  # of the job
    missing: tuple[int, ...]  # indices without a record, in the order to run them
    head: str = ""  # what a shard's first prompt begins with, as it sorts among shards
    is_strict: bool = False  # one bad line fails the job
    endpoint: str | None = None  # the one all lines must name; None: each its own
    traceparent: str = ""  # W3C trace context of the job or, once it is held, of what is done under it; "": none
