"""What `millrace doctor` asks Redis."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import redis

from settings import RedisSettings, SettingsError
from worker.broker.queue_lanes import QUEUE
from worker.cli.finding import Finding
from worker.cli.level import Level
from worker.registry.connect import connect
from worker.registry.keys import Keys

OLDEST_VERSION = (6, 2)  # celery 5.7
_PERMISSIONS_FIX = "load the users that `millrace acl` prints, or give this one what it lacks"


def redis_findings(settings: RedisSettings, shown_url: str, *, for_worker: bool = False) -> Iterator[Finding]:
    """Reachability, version, persistence, eviction policy, permissions. `shown_url` has its password masked."""
    try:
        client = connect(settings)
    except SettingsError as error:
        yield Finding("redis", Level.FAILED, str(error), "set what the line names")
        return
    try:
        info = {str(key): str(value) for key, value in client.info().items()}
        permissions = _permissions(client, for_worker=for_worker)
    except redis.RedisError as error:
        yield Finding("redis", Level.FAILED, f"{shown_url}: {error}", _way_in(error))
        return
    finally:
        client.close()
    yield Finding("redis", Level.OK, f"{shown_url} answers")
    yield _version(info)
    yield _persistence(info)
    yield _eviction(info)
    yield permissions


def _way_in(error: redis.RedisError) -> str:
    if isinstance(error, redis.AuthenticationError | redis.exceptions.AuthenticationWrongNumberOfArgsError):
        return "give the user and the password of the ACL file: redis.url, or redis.password_file"
    if isinstance(error, redis.exceptions.NoPermissionError):
        return _PERMISSIONS_FIX
    return "start redis-server there, or set redis.url (MILLRACE_REDIS__URL, --redis-url)"


def _permissions(client: redis.Redis, *, for_worker: bool) -> Finding:
    """Asked by reading alone, and only for what is needed: Redis logs each denial (ACL LOG)."""
    keys = Keys()
    calls: list[tuple[str | int, ...]] = [
        ("HGETALL", keys.admission),
        ("ZRANGE", keys.jobs, 0, 0),
        ("LLEN", QUEUE),
        ("SCRIPT", "EXISTS", "0" * 40),
        ("EXISTS", "unacked") if for_worker else ("SCAN", 0),
    ]
    denied = [" ".join(map(str, call[:2])) for call in calls if not _may(client, *call)]
    who = "a worker" if for_worker else "a producer"
    if denied:
        return Finding("redis permissions", Level.FAILED, f"{who} needs {', '.join(denied)}", _PERMISSIONS_FIX)
    return Finding("redis permissions", Level.OK, f"{who} may do its work")


def _may(client: redis.Redis, *call: str | int) -> bool:
    try:
        client.execute_command(*call)  # type: ignore[no-untyped-call]  # redis-py has no types here
    except redis.exceptions.NoPermissionError:
        return False
    return True


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
