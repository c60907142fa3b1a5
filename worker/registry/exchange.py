"""Sends commands and calls of scripts to Redis, and reads its replies.

What is asked is written once, as an exchange, for threads and event loops. The client does not decode: request lines
may be any bytes.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Generator, Iterable, Mapping, Sequence
from typing import Any, TypeVar

import redis
from redis.asyncio import Redis as AsyncRedis
from redis.exceptions import NoPermissionError, NoScriptError, OutOfMemoryError, ReadOnlyError

from worker.registry.errors import FunctionsMissing
from worker.registry.lua import CallsBy, PlainCommand, ScriptCall, call_of_nothing, library, library_name

T = TypeVar("T")

Command = PlainCommand | ScriptCall

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


NOT_FOUND = "Function not found"  # what Redis answers


class RegistryRedis(redis.Redis):
    """A client that remembers how its server calls the scripts, so that it is looked up once."""

    calls_by: CallsBy | None = None  # not looked up yet


class AsyncRegistryRedis(AsyncRedis):
    """RegistryRedis for an event loop."""

    calls_by: CallsBy | None = None


def ask(client: redis.Redis, commands: Sequence[Command]) -> list[RedisReply]:
    """The answers to these commands, in one round trip unless Redis has to be given the scripts first.

    All of them are then sent again, so of several scripts each must bear to run twice. Raises redis.RedisError, and
    FunctionsMissing where Redis has to be given them by somebody else.
    """
    steps = _asking(commands, client.calls_by if isinstance(client, RegistryRedis) else None)
    try:
        step = next(steps)
        while True:
            try:
                answers = _send(client, step)
            except redis.ResponseError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answers)
    except StopIteration as end:
        found, calls_by = end.value
        if isinstance(client, RegistryRedis):
            client.calls_by = calls_by
        return list(found)


async def _ask_async(client: AsyncRedis, commands: Sequence[Command]) -> list[RedisReply]:
    steps = _asking(commands, client.calls_by if isinstance(client, AsyncRegistryRedis) else None)
    try:
        step = next(steps)
        while True:
            try:
                answers = await _send_async(client, step)
            except redis.ResponseError as error:
                step = steps.throw(error)
            else:
                step = steps.send(answers)
    except StopIteration as end:
        found, calls_by = end.value
        if isinstance(client, AsyncRegistryRedis):
            client.calls_by = calls_by
        return list(found)


def ask_one(client: redis.Redis, command: Command) -> RedisReply:
    """The answer to one command, see `ask`."""
    [answer] = ask(client, [command])
    return answer


# Yields commands to be sent as they are, and is sent their answers, or has the error thrown in.
_Steps = Generator[Sequence[PlainCommand], list[RedisReply], T]


def _asking(commands: Sequence[Command], calls_by: CallsBy | None) -> _Steps[tuple[list[RedisReply], CallsBy | None]]:
    """The answers, and how the server calls scripts; None: not looked up."""
    if not any(isinstance(command, ScriptCall) for command in commands):
        return (yield _as_sent(commands, CallsBy.SCRIPT)), calls_by
    if calls_by is None:
        calls_by = yield from _looked_up()
    try:
        return (yield _as_sent(commands, calls_by)), calls_by
    except NoScriptError:
        yield _loads(commands)
    except redis.ResponseError as error:
        # The library was lost with Redis's file, or the user may FCALL now and send scripts no more.
        is_lost = calls_by is CallsBy.FUNCTION and str(error).endswith(NOT_FOUND)
        if not is_lost and not (calls_by is CallsBy.SCRIPT and isinstance(error, NoPermissionError)):
            raise
        before, calls_by = calls_by, (yield from _looked_up())
        if before is calls_by is CallsBy.SCRIPT:
            raise
    return (yield _as_sent(commands, calls_by)), calls_by


def _looked_up() -> _Steps[CallsBy]:
    """By functions where Redis has this version's library, or takes it from this user; else by scripts."""
    try:
        yield [call_of_nothing()]
    except NoPermissionError:  # an ACL file of a version before
        return CallsBy.SCRIPT
    except redis.ResponseError as error:
        if is_without_functions(error):
            return CallsBy.SCRIPT
        if str(error) != NOT_FOUND:
            raise
    else:
        return CallsBy.FUNCTION
    try:
        yield [("FUNCTION", "LOAD", "REPLACE", library())]
    except (NoPermissionError, OutOfMemoryError, ReadOnlyError):
        pass  # a full server or a replica takes scripts all the same
    else:
        return CallsBy.FUNCTION
    try:
        yield [("SCRIPT", "LOAD", "return 1")]
    except NoPermissionError:
        raise FunctionsMissing(library_name()) from None
    return CallsBy.SCRIPT


def is_without_functions(error: redis.ResponseError) -> bool:
    """Whether it is the answer of a server before Redis 7.0 to a call of a function."""
    return str(error).startswith("unknown command")


def _as_sent(commands: Sequence[Command], calls_by: CallsBy) -> list[PlainCommand]:
    return [
        (*command.script.called(calls_by), *command.arguments) if isinstance(command, ScriptCall) else command
        for command in commands
    ]


def _send(client: redis.Redis, commands: Sequence[PlainCommand]) -> list[RedisReply]:
    if len(commands) == 1:  # of a pipeline, redis-py's errors begin with the command
        return [client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]  # redis has no type here
    with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)  # type: ignore[no-untyped-call]  # nor here
        return list(pipeline.execute())


async def _send_async(client: AsyncRedis, commands: Sequence[PlainCommand]) -> list[RedisReply]:
    if len(commands) == 1:
        return [await client.execute_command(*commands[0])]  # type: ignore[no-untyped-call]  # nor here
    async with client.pipeline(transaction=False) as pipeline:
        for command in commands:
            pipeline.execute_command(*command)
        return list(await pipeline.execute())


def _loads(commands: Sequence[Command]) -> list[PlainCommand]:
    sources = {call.script.digest: call.script.source for call in commands if isinstance(call, ScriptCall)}
    return [("SCRIPT LOAD", source) for source in sources.values()]


def text(value: bytes | str) -> str:
    """A word that we wrote (state, token, id), from a reply."""
    return value.decode() if isinstance(value, bytes) else value


def text_fields(fields: Mapping[Untyped, Untyped]) -> dict[str, str]:
    """A hash whose values are all text that we wrote."""
    return {text(name): text(value) for name, value in fields.items()}


def raw_values(values: Iterable[bytes | str | None]) -> list[bytes | None]:
    """Values as they were stored."""
    return [value.encode() if isinstance(value, str) else value for value in values]
