"""A tenant's shards that nobody holds."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class TenantBacklog:
    """A tenant's shards that nobody holds, as far as they were read."""

    tenant: str
    open_prompts: int  # of all its jobs, without a record
    waiting: Mapping[int, tuple[int, float]]  # by priority: shards, and for how many seconds the oldest has waited
    num_unread: int  # more shards, of which only the number is known
