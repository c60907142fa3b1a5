"""Shards that nobody holds."""

from __future__ import annotations

from collections.abc import Iterable

import redis

from worker.registry.claim import Claim
from worker.registry.keys import Keys
from worker.registry.redis_reply import text
from worker.registry.script_set import Argument, ScriptSet
from worker.registry.unit_ref import UnitRef

HINT, NONE = "hint", "none"


class ShardQueue:
    """Chooses which queued shard a worker should claim next. Raises redis.RedisError when Redis cannot be had."""

    def __init__(self, client: redis.Redis, keys: Keys, *, ageing_s: float) -> None:
        self._keys = keys
        self._scripts = ScriptSet(client)
        self._ageing_ms = round(ageing_s * 1000)

    def choose(self, hint: UnitRef, held: Iterable[Claim], *, only_new_tenants: bool) -> UnitRef | None:
        """The shard to claim on a message about `hint`, by a worker that holds these; None if none may be claimed.

        The tenant with the fewest prompts here comes first, and of its shards the one whose turn is earliest, by time
        and priority; of those within a step of priority of it the next in prefix order. `only_new_tenants`: none of a
        tenant that has shards here. Whether the shard can be claimed shows when it is; it is `hint` if none is queued.
        """
        here: dict[str, tuple[int, str]] = {}
        for claim in held:
            here[claim.tenant] = (here.get(claim.tenant, (0, ""))[0] + len(claim.missing), claim.head)
        arguments: list[Argument] = [self._keys.prefix, int(only_new_tenants), self._ageing_ms, str(hint)]
        for tenant, (num_prompts, head) in here.items():
            arguments += [tenant, num_prompts, head]
        keys = [self._keys.unit(hint), self._keys.queued, self._keys.job(hint.job_id)]
        answer = text(self._scripts.run("choose", keys, arguments))
        if answer == NONE:
            return None
        return hint if answer == HINT else UnitRef.of_member(answer)
