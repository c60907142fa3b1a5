"""How much work waits, for whom and for how long."""

from __future__ import annotations

import redis

from worker.broker.queue_lanes import PRIORITY_STEPS, lanes_by_priority
from worker.registry.exchange import perform
from worker.registry.keys import Keys
from worker.registry.query_script import QueryScript
from worker.registry.queue_reading import QueueReading
from worker.registry.redis_reply import RedisReply, text
from worker.registry.tenant_backlog import TenantBacklog

MAX_SHARDS = 500  # read in one look: bounds the time for which Redis does nothing else


class QueueFigures:
    """Reads the queue's figures in two round trips, changing nothing. Raises redis.RedisError."""

    def __init__(self, client: redis.Redis, keys: Keys, *, max_tenants: int) -> None:
        self._client = client
        self._keys = keys
        self._max_tenants = max_tenants  # told apart
        self._script = QueryScript("queue")

    def read(self) -> QueueReading:
        """The queue at this moment."""
        keys = [self._keys.open, self._keys.queued, self._keys.admission, self._keys.dead]
        reply = perform(self._client, self._script(keys, [self._keys.prefix, self._max_tenants, MAX_SHARDS]))
        num_units, overdue_ms, num_dead, num_tenants, counters, rows, num_others = reply
        jobs, prompts, num_bytes, sub_jobs, sub_prompts, total, frames, done, failed, cancelled, expired = [
            int(value or 0) for value in counters
        ]
        return QueueReading(
            open_jobs=jobs,
            open_prompts=prompts,
            open_bytes=num_bytes,
            open_units=num_units,
            overdue_s=overdue_ms / 1000,
            backlogs=tuple(_backlog(row) for row in rows),
            other_waiting_shards=num_others,
            num_waiting_tenants=num_tenants,
            messages=self._messages(),
            submitted_jobs=sub_jobs,
            submitted_prompts=sub_prompts,
            ended_jobs={"completed": done, "failed": failed, "cancelled": cancelled, "expired": expired},
            num_records=total,
            num_dead_units=num_dead,
            num_dead_frames=frames,
        )

    def _messages(self) -> dict[int, int]:
        # Not in the script: the broker's lists are in another hash slot.
        with self._client.pipeline(transaction=False) as pipeline:
            for lane in dict.fromkeys(lanes_by_priority()):
                pipeline.llen(lane)
            return dict(zip(PRIORITY_STEPS, pipeline.execute(), strict=True))


def _backlog(row: RedisReply) -> TenantBacklog:
    tenant, prompts, by_priority, num_unread = row
    # A shard whose job is gone has no priority any more; `choose` takes it out.
    waiting = {int(priority): (count, oldest_ms / 1000) for priority, count, oldest_ms in by_priority if priority}
    return TenantBacklog(text(tenant), int(prompts), waiting, num_unread)
