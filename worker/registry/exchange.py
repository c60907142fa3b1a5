"""Sends commands and the Lua scripts of scripts/ to Redis, and reads its replies.

What is asked is written once, as an exchange, for threads and event loops. The client does not decode: request lines
may be any bytes.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from functools import cached_property
from importlib import resources
from typing import Any, TypeVar

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoScriptError

from worker.registry import scripts

T = TypeVar("T")

Argument = str | bytes | int | float
Command = Sequence[Argument]  # its name, then its arguments

# What Celery, kombu and Lua scripts hand over: only the code that takes it apart knows its shape.
Untyped = Any
RedisReply = Untyped

# Yields commands that may travel together and is sent their answers, or a pause in seconds; returns what came of it.
Exchange = Generator[Sequence[Command] | float, list[RedisReply], T]


def perform(client: redis.Redis, exchange: Exchange[T]) -> T:
    """Hold the exchange with `client`, one round trip a step. Raises redis.RedisError, and what the exchange raises."""
    try:
        step = next(exchange)
        while True:
            if isinstance(step, float):
                time.sleep(step)
                step = next(exchange)
            else:
                step = exchange.send(ask(client, step))
    except StopIteration as end:
        result: T = end.value
        return result


async def perform_async(client: AsyncRedis, exchange: Exchange[T]) -> T:
    """`perform` in an event loop."""
    try:
        step = next(exchange)
        while True:
            if isinstance(step, float):
                await asyncio.sleep(step)
                step = next(exchange)
            else:
                step = exchange.send(await _ask_async(client, step))
    except StopIteration as end:
        result: T = end.value
        return result


def ask(client: redis.Redis, commands: Sequence[Command]) -> list[RedisReply]:
    """The answers to these commands, in one round trip unless Redis has to be given a script first.

    All of them are then sent again, so of several scripts each must bear to run twice. Raises redis.RedisError.
    """
    try:
        return _send(client, commands)
    except NoScriptError:
        _send(client, _loads(commands))
        return _send(client, commands)


async def _ask_async(client: AsyncRedis, commands: Sequence[Command]) -> list[RedisReply]:
    try:
        return await _send_async(client, commands)
    except NoScriptError:
        await _send_async(client, _loads(commands))
        return await _send_async(client, commands)


def ask_one(client: redis.Redis, command: Command) -> RedisReply:
    """The answer to one command, see `ask`."""
    [answer] = ask(client, [command])
    return answer


def _send(client: redis.Redis, commands: Sequence[Command]) -> list[RedisReply]:
    if len(commands) == 1:  # of a pipeline, redis-py's errors begin with the command
        return [client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]  # redis has no type here
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # nor here
        return list(pipeline.execute())


async def _send_async(client: AsyncRedis, commands: Sequence[Command]) -> list[RedisReply]:
    if len(commands) == 1:
        return [await client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]  # nor here
    async with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute())


_UNIT_KEYS = "job records order lines unit plan open counters dead resume_states queued"  # the order of prelude.lua


# Redis 6.2 to 8.2 looks at its memory before a script's first write alone, and refuses none that takes away.
_ALLOW_OOM = "redis.call('UNLINK', KEYS[1] .. ':none')\n"


class Script:
    """One of scripts/*.lua, with names for its KEYS and ARGV in the order in which it reads them.

    Redis is told its digest, so workers of two versions can share one, each with its own scripts.
    """

    def __init__(
        self, name: str, arguments: str = "", *, row: str = "", keys: str = _UNIT_KEYS, allow_oom: bool = False
    ) -> None:
        """`allow_oom`: also where Redis has no memory left; for what makes room, or needs next to none."""
        self.name = name
        self.allow_oom = allow_oom
        self._files = ("prelude", name) if keys == _UNIT_KEYS else (name,)
        self.keys = keys.split()
        self.arguments = arguments.split()
        self.row = row.split()  # what follows the arguments, any number of times

    def __call__(
        self, keys: Mapping[str, str], rows: Iterable[Sequence[Argument]] = (), **arguments: Argument
    ) -> Command:
        """The command that calls it, with those of `keys` that it takes. Raises TypeError for what it does not take."""
        if arguments.keys() != set(self.arguments):
            raise TypeError(f"{self.name}.lua is given {sorted(arguments)}; accepted: {self.arguments}")
        command: list[Argument] = ["EVALSHA", self.digest, len(self.keys)]
        command += [keys[name] for name in self.keys]
        command += [arguments[name] for name in self.arguments]
        for row in rows:
            if len(row) != len(self.row):
                raise TypeError(f"{self.name}.lua is given a row of {len(row)}; accepted: {self.row}")
            command += row
        return command

    @cached_property
    def source(self) -> str:
        """Its text."""
        return _ALLOW_OOM * self.allow_oom + script_source(*self._files)

    @cached_property
    def digest(self) -> str:
        """The SHA-1 of its text, by which Redis knows it."""
        return hashlib.sha1(self.source.encode("ascii"), usedforsecurity=False).hexdigest()


_RECORD = "index outcome record prompt_tokens cached_tokens output_tokens resumed_tokens reasoning_tokens"


class Scripts:
    """Every script, with what it takes; its first comment says what the words mean."""

    # About a unit
    BEGIN_ALONE = Script("begin_alone", "job_id unit token")
    CANCEL = Script("cancel", "job_id", allow_oom=True)
    CLAIM = Script("claim", "job_id unit worker nonce lease_ms max_attempts alone models", allow_oom=True)
    FAIL = Script("fail", "job_id token reason errors", allow_oom=True)
    MEND = Script("mend", "job_id", allow_oom=True)
    PLANNED = Script("planned", "job_id token grace_ms ageing_ms endpoints model traceparent", row="indices head model")
    PUT = Script("put", "job_id unit token num_known", row=_RECORD)
    PUT_AT_END = Script("put", "job_id unit token num_known", row=_RECORD, allow_oom=True)
    PUT_RESUME_STATES = Script("checkpoint", "job_id unit token", row="index state")
    RELEASE = Script("release", "job_id unit token grace_ms count_attempt", allow_oom=True)
    RENEW = Script("renew", "job_id unit token lease_ms num_known", allow_oom=True)
    SUSPECT = Script("suspect")
    # About a job
    DELETE = Script("delete", "job_id", keys="job records order lines jobs counters", allow_oom=True)
    DISCARD = Script("discard", keys="job lines")
    PAGE = Script("page", "order cursor last max_records max_bytes", keys="job records order")
    REFUSE = Script("refuse", "job_id reason errors tenant retain_ms staging_ms", keys="job jobs staged")
    STAGE = Script("stage", "staging_ms", row="index line", keys="job staged")
    SUBMIT = Script("submit", "job", keys="job lines plan open counters tenant_counters jobs staged")
    SUBMIT_ONCE = Script("submit", "job", keys="job lines plan open counters tenant_counters jobs staged idempotency")
    # About all of them
    ANNOUNCE = Script("announce", "worker announcement ttl_ms known_ms only_check", keys="served known_models")
    CHOOSE = Script(
        "choose", "prefix only_new_tenants ageing_ms hint models", row="tenant num_prompts head", keys="unit queued job"
    )
    QUEUE_FIGURES = Script("queue", "prefix max_tenants max_shards", keys="open queued counters dead")
    REAP = Script(
        "reap",
        "prefix max_units grace_ms longest_grace_ms stale_ms unserved_ms plan_priority ageing_ms steps patience_ms "
        "served_ttl_ms",
        row="model messages",  # of each model that is served, and of none: how many messages wait by lane's step, JSON
        keys="open served",
    )


def _loads(calls: Sequence[Command]) -> list[Command]:
    digests = {call[1] for call in calls if call[0] == "EVALSHA"}
    sources = {script.digest: script.source for script in vars(Scripts).values() if isinstance(script, Script)}
    return [("SCRIPT LOAD", source) for digest, source in sources.items() if digest in digests]


def script_source(*names: str) -> str:
    """The text of these files of scripts/, one after the other."""
    return "".join(resources.files(scripts).joinpath(f"{name}.lua").read_text(encoding="ascii") for name in names)


def text(value: bytes | str) -> str:
    """A word that we wrote (state, token, id), from a reply."""
    return value.decode() if isinstance(value, bytes) else value


def text_fields(fields: Mapping[Untyped, Untyped]) -> dict[str, str]:
    """A hash whose values are all text that we wrote."""
    return {text(name): text(value) for name, value in fields.items()}


def raw_values(values: Iterable[bytes | str | None]) -> list[bytes | None]:
    """Values as they were stored."""
    return [value.encode() if isinstance(value, str) else value for value in values]
