"""The queue, read."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from worker.registry.tenant_backlog import TenantBacklog


@dataclass(frozen=True, slots=True)
class QueueReading:
    """How much work there is in Redis. Counters are of all time, all workers and all producers."""

    open_jobs: int
    open_prompts: int  # without a record
    open_bytes: int  # of those jobs' lines
    open_units: int  # plans and shards that are not finished
    overdue_s: float  # how long the first of them has been due for a look that nobody gave it
    backlogs: tuple[TenantBacklog, ...]  # of the tenants with the most waiting shards
    other_waiting_shards: int  # of all other tenants together
    num_waiting_tenants: int
    messages: Mapping[int, int]  # in the broker's lanes, by the lane's step
    submitted_jobs: int
    submitted_prompts: int
    ended_jobs: Mapping[str, int]  # by state, see JobState
    num_records: int
    num_dead_units: int  # given up, of the last week
    num_dead_frames: int  # that were no message
