"""Cancelling jobs."""

from __future__ import annotations

import redis

from worker.registry.errors import JobNotFound
from worker.registry.keys import Keys
from worker.registry.redis_reply import text
from worker.registry.script_set import ScriptSet
from worker.registry.unit_ref import UnitRef


class JobControl:
    """Asks for a job's end. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._keys = keys
        self._scripts = ScriptSet(client)

    def cancel(self, job_id: str) -> list[UnitRef]:
        """Mark the job cancelled; the units it may still have, none for one that is over. Raises JobNotFound."""
        plan = UnitRef.plan(job_id)
        status, num_shards = self._scripts.run("cancel", self._keys.of_unit_scripts(plan), [job_id])
        if text(status) == "gone":
            raise JobNotFound(job_id)
        if text(status) == "terminal":
            return []
        return [plan, *(UnitRef.shard(job_id, number) for number in range(num_shards))]
