"""What `millrace doctor` asks Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import redis

from settings import RedisSettings
from worker.cli.finding import Finding
from worker.cli.level import Level

OLDEST_VERSION = (6, 2)  # celery 5.7


def redis_findings(settings: RedisSettings, shown_url: str) -> Iterator[Finding]:
    """Reachability, version, persistence and eviction policy. `shown_url` has its password masked."""
    client = redis.Redis.from_url(
        settings.url.get_secret_value(),
        socket_timeout=settings.socket_timeout_s,
        socket_connect_timeout=settings.connect_timeout_s,
        decode_responses=True,
    )
    try:
        info = {str(key): str(value) for key, value in client.info().items()}
    except redis.RedisError as error:
        yield Finding(
            "redis",
            Level.FAILED,
            f"{shown_url}: {error}",
            "start redis-server there, or set redis.url (MILLRACE_REDIS__URL, --redis-url)",
        )
        return
    finally:
        client.close()
    yield Finding("redis", Level.OK, f"{shown_url} answers")
    yield _version(info)
    yield _persistence(info)
    yield _eviction(info)


def _version(info: Mapping[str, str]) -> Finding:
    version = info.get("redis_version", "unknown")
    parts = [int(part) for part in version.split(".")[:2] if part.isdigit()]
    oldest = ".".join(map(str, OLDEST_VERSION))
    if tuple(parts) < OLDEST_VERSION:
        return Finding("redis version", Level.FAILED, f"{version} is too old", f"install Redis {oldest} or later")
    return Finding("redis version", Level.OK, version)


def _persistence(info: Mapping[str, str]) -> Finding:
    if info.get("aof_enabled") == "1":
        return Finding("redis persistence", Level.OK, "append-only file is on")
    return Finding(
        "redis persistence",
        Level.WARNING,
        "append-only file is off: a restart of Redis loses jobs and results",
        "redis-cli CONFIG SET appendonly yes, and appendonly yes in redis.conf",
    )


def _eviction(info: Mapping[str, str]) -> Finding:
    policy = info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return Finding("redis eviction", Level.OK, "noeviction")
    limited = info.get("maxmemory", "0") != "0"
    return Finding(
        "redis eviction",
        Level.FAILED if limited else Level.WARNING,
        f"{policy}: under memory pressure Redis drops jobs and results",
        "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
    )
