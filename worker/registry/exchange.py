"""Sends commands and the Lua scripts of scripts/ to Redis, and reads its replies.

An exchange does not know who sends it, so threads and event loops ask the same questions. The client does not decode:
request lines may be any bytes.
"""

from __future__ import annotations

import hashlib
from collections.abc import Generator, Iterable, Mapping, Sequence
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoScriptError

from worker.registry import scripts

T = TypeVar("T")

Command = Sequence[str | int]  # its name, then its arguments

# What Celery, kombu and Lua scripts hand over: only the code that takes it apart knows its shape.
Untyped = Any
RedisReply = Untyped

# Yields commands that may travel together, is sent their answers (or NoScriptError), and returns what came of it.
Exchange = Generator[Sequence[Command], list[RedisReply], T]

# About a unit, so they begin with the prelude's names and functions.
_UNIT_SCRIPTS = frozenset(
    {"claim", "suspect", "begin_alone", "put", "renew", "release", "planned", "fail", "cancel", "checkpoint"}
)

Argument = str | bytes | int | float


def perform(client: redis.Redis, exchange: Exchange[T]) -> T:
    """Hold the exchange with `client`, one round trip a step. Raises redis.RedisError, and what the exchange raises."""
    try:
        commands = next(exchange)
        while True:
            with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # redis has no type here
                try:
                    answers = pipeline.execute()
                except redis.exceptions.NoScriptError as error:
                    commands = exchange.throw(error)
                else:
                    commands = exchange.send(answers)
    except StopIteration as end:
        result: T = end.value
        return result


async def perform_async(client: AsyncRedis, exchange: Exchange[T]) -> T:
    """`perform` in an event loop."""
    try:
        commands = next(exchange)
        while True:
            async with client.pipeline(transaction=False) as pipeline:
                for command in commands:
                    pipeline.execute_command(*command)
                try:
                    answers = await pipeline.execute()
                except redis.exceptions.NoScriptError as error:
                    commands = exchange.throw(error)
                else:
                    commands = exchange.send(answers)
    except StopIteration as end:
        result: T = end.value
        return result


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


def text(value: bytes | str) -> str:
    """A word of ours (state, token, id) from a reply."""
    return value.decode() if isinstance(value, bytes) else value


def text_fields(fields: Mapping[Untyped, Untyped]) -> dict[str, str]:
    """A hash whose values are all text of ours."""
    return {text(name): text(value) for name, value in fields.items()}


def raw_values(values: Iterable[bytes | str | None]) -> list[bytes | None]:
    """Values as they were stored."""
    return [value.encode() if isinstance(value, str) else value for value in values]
