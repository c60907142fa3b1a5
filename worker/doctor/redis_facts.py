"""Asks one Redis about itself: server, settings, memory, users, clock and round trip."""

from __future__ import annotations

import statistics
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any
from urllib.parse import urlsplit

import redis
from pydantic import SecretStr
from redis.backoff import NoBackoff
from redis.retry import Retry

from settings import RedisSettings
from worker.acl import FLOWER, PRODUCER, WORKER
from worker.registry.connect import RedisAddress, connect
from worker.registry.trust import RedisServer

NUM_ROUND_TRIPS = 20
_CONFIG = ("appendfsync", "save", "stop-writes-on-bgsave-error", "protected-mode", "enable-debug-command")
# These users may call neither CONFIG nor ACL, and Redis logs each denial (ACL LOG), so we do not try.
_LIMITED_USERS = frozenset(user.name for user in (PRODUCER, WORKER, FLOWER))


@dataclass(frozen=True, slots=True)
class RedisFacts:
    """What one Redis says of itself, and how we reach it. Asking changes nothing."""

    address: RedisAddress
    user: str  # who we are
    info: Mapping[str, str]  # INFO's fields
    config: Mapping[str, str]  # of _CONFIG; empty where this user may not know
    rules: frozenset[str] | None  # what this user may call, such as `-@all` and `+hget`; None: it may not know
    lets_anyone_in: bool  # whether a client without a password may send commands
    clock_offset_s: float  # Redis's clock less ours
    round_trip_s: float  # median of NUM_ROUND_TRIPS

    @classmethod
    def ask(cls, client: redis.Redis, settings: RedisSettings) -> RedisFacts:
        """Ask, in some thirty round trips. Raises redis.RedisError."""
        options = client.connection_pool.connection_kwargs
        user = options.get("username") or "default"
        is_limited = user in _LIMITED_USERS
        clock_offset_s, round_trip_s = _clock_and_round_trip_s(client)
        return cls(
            address=RedisAddress.of(settings),
            user=user,
            info={str(key): str(value) for key, value in client.info().items()},
            config={} if is_limited else _config(client),
            rules=None if is_limited else _rules(client, user),
            lets_anyone_in=not options.get("password") or _lets_anyone_in(settings),
            clock_offset_s=clock_offset_s,
            round_trip_s=round_trip_s,
        )

    @property
    def may_look_around(self) -> bool:
        """Whether this user may SCAN, which finds the workers."""
        return self.user not in {WORKER.name, FLOWER.name}

    @property
    def server(self) -> RedisServer:
        """What decides whether it may be trusted with jobs."""
        return RedisServer.of_info(self.info)

    def count(self, field: str) -> int:
        """A number of INFO; 0 if this server does not give it."""
        return int(self.info.get(field, "0"))


def connect_once(settings: RedisSettings) -> redis.Redis:
    """A client that does not try again, so that what is missing is said at once. Raises SettingsError."""
    client = connect(settings)
    client.set_retry(Retry(NoBackoff(), 0))
    # The check is a PING, which a Redis that cannot write to its disk refuses; its INFO is to say so.
    client.connection_pool.connection_kwargs["health_check_interval"] = 0
    return client


def _config(client: redis.Redis) -> dict[str, str]:
    with client.pipeline(transaction=False) as pipeline:
        for name in _CONFIG:
            pipeline.config_get(name)
        try:
            answers: list[Mapping[Any, Any]] = pipeline.execute()
        except redis.ResponseError:  # not allowed, or renamed, as hosted services do
            return {}
    return {_text(key): _text(value) for answer in answers for key, value in answer.items()}


def _rules(client: redis.Redis, user: str) -> frozenset[str] | None:
    try:
        found: Mapping[str, Any] | None = client.acl_getuser(user)
    except redis.ResponseError:
        return None
    return frozenset((*found["commands"], *found["categories"])) if found else None


def _lets_anyone_in(settings: RedisSettings) -> bool:
    url = settings.url.get_secret_value()
    user_info, at, _ = urlsplit(url).netloc.rpartition("@")
    url = url.replace(user_info + at, "", 1)
    anonymous = {"url": SecretStr(url), "password_file": None, "allow_unauthenticated": True}
    with connect_once(settings.model_copy(update=anonymous)) as client:
        try:
            client.time()
        except redis.RedisError:
            return False
    return True


def _clock_and_round_trip_s(client: redis.Redis) -> tuple[float, float]:
    """By TIME, as a Redis whose disk is full refuses PING."""
    offsets_s, took_s = [], []
    for _ in range(NUM_ROUND_TRIPS):
        before, sent_s = time.time(), time.monotonic()
        seconds, microseconds = client.time()
        took_s.append(time.monotonic() - sent_s)
        offsets_s.append(float(seconds) + float(microseconds) / 1e6 - (before + took_s[-1] / 2))
    return statistics.median(offsets_s), statistics.median(took_s)


def _text(value: object) -> str:
    return value.decode() if isinstance(value, bytes) else str(value)
