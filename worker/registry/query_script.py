"""A script that an exchange runs."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

from redis.exceptions import NoScriptError

from worker.registry.exchange import Exchange
from worker.registry.redis_reply import RedisReply
from worker.registry.script_set import script_source


class QueryScript:
    """Runs one of scripts/*.lua by its digest, and loads it where Redis does not have it yet: ScriptSet's way."""

    def __init__(self, name: str) -> None:
        self._source = script_source(name)
        self._digest = hashlib.sha1(self._source.encode("ascii"), usedforsecurity=False).hexdigest()

    def __call__(self, keys: Sequence[str], arguments: Sequence[str | int]) -> Exchange[RedisReply]:
        """The script's reply, in one round trip but for the first after Redis started."""
        command = ("EVALSHA", self._digest, len(keys), *keys, *arguments)
        try:
            [reply] = yield [command]
        except NoScriptError:
            _, reply = yield [("SCRIPT LOAD", self._source), command]
        return reply
