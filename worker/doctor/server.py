"""Checks how old the server is, whether it takes writes, who may do what there, and who can listen."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

import redis

from settings import RedisSettings
from worker.doctor.redis_facts import RedisFacts
from worker.doctor.report import Finding, Level
from worker.registry.keys import Keys
from worker.registry.queues import QUEUE

OLDEST_REDIS = (6, 2)  # celery 5.7

# The users of `millrace acl` have none of these: each makes a stolen password worth more than the queue.
_DANGEROUS = frozenset(
    (
        *("+@admin", "+@dangerous", "+acl", "+config", "+debug", "+module", "+migrate", "+replicaof", "+slaveof"),
        *("+shutdown", "+flushall", "+flushdb", "+keys", "+restore", "+eval", "+monitor", "+client"),
    )
)
_USERS = "give producers and workers the users of `millrace acl` (redis-server --aclfile)"
PERMISSIONS_FIX = "load the users that `millrace acl` prints, or give this one what it lacks"


def server_findings(info: Mapping[str, str]) -> Iterator[Finding]:
    """Version, role, no cluster: from the fields of INFO."""
    yield _version(info)
    yield _role(info)
    if info.get("cluster_enabled") == "1":
        yield Finding(
            "redis cluster",
            Level.FAILED,
            "Redis Cluster: the queue's keys would lie on several nodes",
            "use a Redis that is not a cluster (cluster-enabled no)",
        )


def _version(info: Mapping[str, str]) -> Finding:
    valkey = info.get("valkey_version")
    if valkey is not None:  # it forked from Redis 7.2 and has said redis_version:7.2.4 ever since
        return Finding("redis version", Level.OK, f"Valkey {valkey}")
    shown = info.get("redis_version", "unknown")
    major, minor, *_ = (*(int(part) if part.isdecimal() else 0 for part in shown.split(".")), 0)
    if (major, minor) >= OLDEST_REDIS:
        return Finding("redis version", Level.OK, f"Redis {shown}")
    oldest = ".".join(map(str, OLDEST_REDIS))
    return Finding("redis version", Level.FAILED, f"Redis {shown} is too old", f"install Redis {oldest} or later")


def _role(info: Mapping[str, str]) -> Finding:
    if info.get("role") != "slave":
        return Finding("redis role", Level.OK, f"primary, with {info.get('connected_slaves', '0')} replicas")
    primary = f"{info.get('master_host')}:{info.get('master_port')}"
    if info.get("slave_read_only") == "1":
        return Finding("redis role", Level.FAILED, f"a replica of {primary}: it takes no writes", "use the primary")
    return Finding("redis role", Level.FAILED, f"a replica of {primary}, which will undo its writes", "use the primary")


def access_findings(facts: RedisFacts, settings: RedisSettings) -> Iterator[Finding]:
    """Who gets in, what we may do beyond our work, what is encrypted, who may read the password."""
    yield _default_user(facts)
    yield _user(facts)
    yield _encryption(facts)
    if facts.config.get("enable-debug-command") == "yes":
        yield Finding(
            "redis protected settings",
            Level.WARNING,
            "enable-debug-command yes: whoever may DEBUG may stop or read the server",
            "set enable-debug-command no in redis.conf and restart Redis",
        )
    file = settings.password_file
    if file is not None and file.stat().st_mode & 0o077:
        detail = f"{file}: others on this machine may read the password"
        yield Finding("redis password file", Level.WARNING, detail, f"chmod 600 {file}")


def permissions(client: redis.Redis, *, for_worker: bool) -> Finding:
    """Whether this user may do a producer's or a worker's work.

    Asked by reading alone, and only for what is needed: Redis logs each denial (ACL LOG).
    """
    keys = Keys()
    calls: list[tuple[str | int, ...]] = [
        ("HGETALL", keys.counters),
        ("ZRANGE", keys.jobs, 0, 0),
        ("LLEN", QUEUE),
        ("SCRIPT", "EXISTS", "0" * 40),
        ("EXISTS", "unacked") if for_worker else ("SCAN", 0),
    ]
    denied = [" ".join(map(str, call[:2])) for call in calls if not _may(client, *call)]
    who = "a worker" if for_worker else "a producer"
    if denied:
        return Finding("redis permissions", Level.FAILED, f"{who} needs {', '.join(denied)}", PERMISSIONS_FIX)
    return Finding("redis permissions", Level.OK, f"{who} may do its work")


def _may(client: redis.Redis, *call: str | int) -> bool:
    try:
        client.execute_command(*call)  # type: ignore[no-untyped-call]  # redis-py has no types here
    except redis.exceptions.NoPermissionError:
        return False
    return True


def _default_user(facts: RedisFacts) -> Finding:
    if not facts.lets_anyone_in:
        return Finding("redis default user", Level.OK, "off, or with a password")
    reach = "whoever reaches the port" if facts.config.get("protected-mode") != "yes" else "everybody on its machine"
    return Finding("redis default user", Level.WARNING, f"needs no password: {reach} may read every prompt", _USERS)


def _user(facts: RedisFacts) -> Finding:
    user, rules = facts.user, facts.rules
    # Of a default user without a password enough was said.
    if rules is None or (user == "default" and facts.lets_anyone_in):
        return Finding("redis user", Level.OK, f"we are {user}")
    # Redis 6.2 writes -@dangerous as -@admin and the commands beside it.
    everything = "+@all" in rules and rules.isdisjoint({"-@dangerous", "-@admin"})
    beyond = ["+@all"] if everything else sorted(rules & _DANGEROUS)
    if not beyond:
        return Finding("redis user", Level.OK, f"we are {user}, with no more than it needs")
    detail = f"we are {user}, with more than our work needs: {' '.join(beyond)}"
    return Finding("redis user", Level.WARNING, detail, _USERS)


def _encryption(facts: RedisFacts) -> Finding:
    if facts.address.is_tls:
        return Finding("redis encryption", Level.OK, "TLS, with the server's certificate and name checked")
    if facts.address.is_on_this_machine:
        return Finding("redis encryption", Level.OK, "none; it does not leave this machine")
    return Finding(
        "redis encryption",
        Level.WARNING,
        "none: the network in between carries the password, every prompt and every answer in the clear",
        "redis.url=rediss://... and TLS in Redis (worker/compose.tls.yaml), unless the network is all your own",
    )
