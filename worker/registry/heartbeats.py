"""Workers telling that they are there."""

from __future__ import annotations

import redis

from worker.registry.keys import Keys
from worker.schemas.worker_info import WorkerInfo

TTL_S = 30


class Heartbeats:
    """Writes a worker's heartbeat. Methods raise redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys) -> None:
        self._client = client
        self._keys = keys

    def beat(self, info: WorkerInfo) -> None:
        """Say that the worker is there, for half a minute."""
        key = f"{self._keys.workers}{info.id}"
        with self._client.pipeline(transaction=True) as pipeline:
            fields = info.model_dump(exclude={"id"})
            pipeline.hset(key, mapping={name: str(value) for name, value in fields.items()})
            pipeline.expire(key, TTL_S)
            pipeline.execute()

    def forget(self, worker_id: str) -> None:
        """Say that it is gone."""
        self._client.delete(f"{self._keys.workers}{worker_id}")
