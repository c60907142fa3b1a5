"""What goes wrong around the workers, one function each. `client` is the bare Redis."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, cast

import redis

from worker.registry.queues import lanes_by_priority

_JUNK = (b"not JSON", b"", b"null", b"[]", b"{}", b"\xff\xfe", b'{"body": "*", "headers": {}, "properties": {}}')


def lanes() -> list[str]:
    """The broker's lists, once each."""
    return list(dict.fromkeys(lanes_by_priority()))


def drop_connections(client: redis.Redis) -> int:
    """CLIENT KILL all but our own; how many there were."""
    return int(client.client_kill_filter(_type="normal", skipme=True))


def flush_scripts(client: redis.Redis) -> None:
    """Let Redis forget every Lua script."""
    client.script_flush()


def duplicate_message(client: redis.Redis, copies: int = 1) -> bool:
    """Put copies of a message that waits or is being worked on into its lane; False if there is none."""
    for lane in lanes():
        frames = cast("list[bytes]", client.lrange(lane, 0, 0))
        if frames:
            client.lpush(lane, *frames * copies)
            return True
    held = cast("dict[bytes, bytes]", client.hgetall("unacked"))
    if not held:
        return False
    message, _, _ = json.loads(random.choice(list(held.values())))
    client.lpush(_lane_of(message), *[json.dumps(message)] * copies)
    return True


def steal_message(client: redis.Redis) -> bool:
    """Take a message out of its lane, as a worker does that dies with it; False if none waits."""
    return any(client.rpop(lane) is not None for lane in lanes())


def junk_frame(client: redis.Redis) -> None:
    """Push a frame that is no message."""
    client.lpush(random.choice(lanes()), random.choice(_JUNK))


@contextmanager
def redis_setting(client: redis.Redis, name: str, value: str) -> Iterator[None]:
    """CONFIG SET for the length of the block."""
    before = cast("dict[str, str]", client.config_get(name))[name]
    client.config_set(name, value)
    try:
        yield
    finally:
        client.config_set(name, before)


def _lane_of(message: dict[str, Any]) -> str:
    return lanes_by_priority()[int(message["properties"]["priority"])]
