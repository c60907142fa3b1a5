"""Leases of which the records are counted."""

from __future__ import annotations

from collections.abc import Sequence

import redis

from settings import WorkerSettings
from worker.metrics.unit_counts import UnitCounts
from worker.registry.claim import Claim
from worker.registry.keys import Keys
from worker.registry.prompt_record import PromptRecord
from worker.registry.put_status import PutStatus
from worker.registry.run_mode import RunMode
from worker.registry.unit_leases import UnitLeases


class CountedLeases(UnitLeases):
    """A worker's leases. Records count once Redis has taken them; one whose answer was lost for good does not."""

    def __init__(
        self, client: redis.Redis, keys: Keys, *, owner: str, settings: WorkerSettings, counts: UnitCounts
    ) -> None:
        super().__init__(
            client,
            keys,
            owner=owner,
            lease_s=settings.lease_s,
            max_attempts=settings.max_attempts,
            grace_s=settings.reap_grace_s,
        )
        self._counts = counts

    def put(self, claim: Claim, records: Sequence[PromptRecord]) -> tuple[PutStatus, RunMode]:
        """UnitLeases.put."""
        status, mode = super().put(claim, records)
        if status is not PutStatus.FENCED:
            self._counts.add_records(records)
        return status, mode
