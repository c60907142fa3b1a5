"""Questions to Redis that do not know who sends them: the same for threads and for an event loop."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from typing import TypeVar

import redis
from redis.asyncio import Redis as AsyncRedis

from worker.registry.redis_reply import RedisReply

T = TypeVar("T")

Command = Sequence[str | int]  # its name, then its arguments
# Yields commands that may travel together, is sent their answers (or NoScriptError), and returns what came of it.
Exchange = Generator[Sequence[Command], list[RedisReply], T]


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
