"""Units that nobody runs."""

from __future__ import annotations

import redis

from worker.broker.queue_lanes import PLAN_PRIORITY, lanes_by_priority, steps_by_priority
from worker.registry.due_unit import DueUnit
from worker.registry.keys import Keys
from worker.registry.redis_reply import text
from worker.registry.script_set import Argument, ScriptSet
from worker.registry.unit_ref import UnitRef

LONGEST_GRACE_S = 600.0  # the doubling of the grace ends here
STALE_S = 600.0  # a unit that waited this long is announced again even while its lane is not empty
MAX_UNITS = 100  # in one look: bounds the script's time


class ReapQueue:
    """Finds units to announce again or to close. Raises redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys, *, grace_s: float, ageing_s: float) -> None:
        self._client = client
        self._keys = keys
        self._scripts = ScriptSet(client)
        self._grace_ms = round(grace_s * 1000)
        self._ageing_ms = round(ageing_s * 1000)  # of waiting, worth one step of priority

    def due(self) -> list[DueUnit]:
        """Units that are due now. Each is put off by its grace, so that one caller alone gets it."""
        arguments: list[Argument] = [self._keys.prefix, MAX_UNITS, self._grace_ms]
        arguments += [round(LONGEST_GRACE_S * 1000), round(STALE_S * 1000), PLAN_PRIORITY, self._ageing_ms]
        arguments += [*steps_by_priority(), *self._waiting_messages()]
        reply = self._scripts.run("reap", [self._keys.open], arguments)
        words = [text(word) for word in reply]
        return [
            DueUnit(UnitRef.of_member(member), should_close=action == "close", priority=int(priority))
            for member, action, priority in zip(words[::3], words[1::3], words[2::3], strict=True)
        ]

    def has_messages(self) -> bool:
        """Whether messages wait in the broker's lanes."""
        return any(self._waiting_messages())

    def _waiting_messages(self) -> list[int]:
        # Not in the script: the broker's lists are in another hash slot.
        lanes = lanes_by_priority()
        with self._client.pipeline(transaction=False) as pipeline:
            for lane in lanes:
                pipeline.llen(lane)
            return list(pipeline.execute())
