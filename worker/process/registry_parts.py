"""A worker's side of the registry."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Self

import redis

from settings import Settings
from worker.metrics.counted_leases import CountedLeases
from worker.metrics.unit_counts import UnitCounts
from worker.registry.connect import connect
from worker.registry.heartbeats import Heartbeats
from worker.registry.keys import Keys
from worker.registry.reap_queue import ReapQueue
from worker.registry.shard_queue import ShardQueue
from worker.registry.unit_leases import UnitLeases


@dataclass(frozen=True, slots=True)
class RegistryParts:
    """The registry's classes that a worker needs, over one connection pool."""

    client: redis.Redis
    keys: Keys
    leases: UnitLeases
    reap_queue: ReapQueue
    shard_queue: ShardQueue
    heartbeats: Heartbeats

    @classmethod
    def connect(cls, settings: Settings, owner: str, counts: UnitCounts) -> Self:
        """For a worker called `owner`. Nothing connects before it is used."""
        client, keys, worker = connect(settings.redis), Keys(), settings.worker
        leases = CountedLeases(client, keys, owner=owner, settings=worker, counts=counts)
        reap_queue = ReapQueue(client, keys, grace_s=worker.reap_grace_s, ageing_s=worker.ageing_s)
        shard_queue = ShardQueue(client, keys, ageing_s=worker.ageing_s)
        return cls(client, keys, leases, reap_queue, shard_queue, Heartbeats(client, keys))
