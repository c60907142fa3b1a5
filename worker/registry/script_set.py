"""The registry's scripts, loaded from their files."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from importlib import resources

import redis

from worker.registry import scripts
from worker.registry.redis_reply import RedisReply

# About a unit, so they begin with the prelude's names and functions.
_UNIT_SCRIPTS = frozenset(
    {"claim", "suspect", "begin_alone", "put", "renew", "release", "planned", "fail", "cancel", "checkpoint"}
)

Argument = str | bytes | int | float


class ScriptSet:
    """Runs scripts by name, by their digest: workers of two versions can share a Redis, each with its own scripts."""

    def __init__(self, client: redis.Redis) -> None:
        self._client = client
        self._scripts = {name: client.register_script(script_source(name)) for name in _names()}

    def run(self, name: str, keys: Sequence[str], arguments: Sequence[Argument]) -> RedisReply:
        """Run one script and return its reply. Raises redis.RedisError."""
        return self._scripts[name](keys=keys, args=arguments)

    def run_many(self, name: str, calls: Iterable[tuple[Sequence[str], Sequence[Argument]]]) -> list[RedisReply]:
        """Run one script for several (keys, arguments) in a single exchange. Raises redis.RedisError."""
        with self._client.pipeline(transaction=False) as pipeline:
            for keys, arguments in calls:
                self._scripts[name](keys=keys, args=arguments, client=pipeline)
            return list(pipeline.execute())


def _names() -> list[str]:
    files = (entry.name for entry in resources.files(scripts).iterdir())
    return sorted(name.removesuffix(".lua") for name in files if name.endswith(".lua") and name != "prelude.lua")


def script_source(name: str) -> str:
    """The text of one script, with the prelude if it is about a unit."""
    folder = resources.files(scripts)
    body = folder.joinpath(f"{name}.lua").read_text(encoding="ascii")
    if name not in _UNIT_SCRIPTS:
        return body
    return folder.joinpath("prelude.lua").read_text(encoding="ascii") + body
