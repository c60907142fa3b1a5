"""Checks which server it is, what is known against it, who may do what there, and who can listen.

The advisories are security releases of Redis and Valkey since October 2024 that concern a server as Millrace uses it,
read on LISTED_ON off the projects' own notes (github.com/redis/redis/releases, 00-RELEASENOTES of each branch,
github.com/valkey-io/valkey/releases) and osv.dev. Left out is what needs a module, RDMA or the bus of Redis Cluster,
and what only crashes a server for a user who has commands that no user of `millrace acl` has. Whoever may submit may
load a script (SCRIPT LOAD, EVALSHA), so a hole in Lua is open to every holder of a password.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Self

import redis

from settings import RedisSettings
from worker.doctor.redis_facts import RedisFacts
from worker.doctor.report import Finding, Level
from worker.registry.keys import Keys
from worker.registry.queues import QUEUE

OLDEST_REDIS = (6, 2)  # celery 5.7

Series = tuple[int, int]  # such as (7, 4)

LISTED_ON = "2026-11-22"

_LUA_STACK = "a script may overflow the stack and run code on the server"
_LUA_COLLECTOR = "a script may run code on the server"
_LUA_2025 = "a script may run code on the server, and act as another user"
_OUTPUT_BUFFERS = "who has no password may fill the server's memory"
_CONNECTIONS = "who has no password may keep others from connecting"
_LUA_ERRORS = "a script may forge replies that others' connections read"
_UNBLOCKING = "a user may run code on the server, by a script or by unblocking a client"
_RESTORE = "a user who may RESTORE (none of Millrace's) may run code on the server"
_TLS = "who reaches the TLS port may run code on the server, without a password"
_TLS_KILL = "a user who may CLIENT KILL (none of Millrace's) may run code on a server with TLS"

_LUA_2025_CVES = ("CVE-2025-49844", "CVE-2025-46817", "CVE-2025-46818", "CVE-2025-46819")

# The users of `millrace acl` have none of these: with each of them a stolen password is worth more than the queue.
_DANGEROUS = frozenset(
    (
        *("+@admin", "+@dangerous", "+acl", "+config", "+debug", "+module", "+migrate", "+replicaof", "+slaveof"),
        *("+shutdown", "+flushall", "+flushdb", "+keys", "+restore", "+eval", "+monitor", "+client"),
    )
)
_USERS = "give producers and workers the users of `millrace acl` (redis-server --aclfile)"
PERMISSIONS_FIX = "load the users that `millrace acl` prints, or give this one what it lacks"


@dataclass(frozen=True, slots=True)
class ServerVersion:
    """Redis or Valkey, which forked from Redis 7.2 and has said `redis_version:7.2.4` ever since."""

    product: str  # Redis or Valkey
    text: str  # as the server says it
    number: tuple[int, int, int]  # what is missing, or no number, is 0

    @classmethod
    def of(cls, info: Mapping[str, str]) -> Self:
        """Of the fields of INFO."""
        is_valkey = "valkey_version" in info
        text = info["valkey_version"] if is_valkey else info.get("redis_version", "unknown")
        parts = [int(part) if part.isdecimal() else 0 for part in text.split(".")]
        major, minor, patch = (*parts, 0, 0, 0)[:3]
        return cls("Valkey" if is_valkey else "Redis", text, (major, minor, patch))

    @property
    def series(self) -> tuple[int, int]:
        """What gets fixes of its own, such as 7.4."""
        return self.number[:2]

    @property
    def is_supported(self) -> bool:
        """Whether the queue works on it."""
        return self.product == "Valkey" or self.series >= OLDEST_REDIS


def server_findings(info: Mapping[str, str]) -> Iterator[Finding]:
    """Version, known holes, role."""
    version = ServerVersion.of(info)
    yield _version(version)
    yield _advisories(version)
    yield _role(info)
    if info.get("cluster_enabled") == "1":
        yield Finding(
            "redis cluster",
            Level.FAILED,
            "Redis Cluster: the queue's keys would lie on several nodes",
            "use a Redis that is not a cluster (cluster-enabled no)",
        )


def _version(version: ServerVersion) -> Finding:
    shown = f"{version.product} {version.text}"
    if version.is_supported:
        return Finding("redis version", Level.OK, shown)
    oldest = ".".join(map(str, OLDEST_REDIS))
    return Finding("redis version", Level.FAILED, f"{shown} is too old", f"install Redis {oldest} or later")


def _advisories(version: ServerVersion) -> Finding:
    table = VALKEY if version.product == "Valkey" else REDIS
    found = [advisory for advisory in table if advisory.affects(version.number)]
    if not found:
        return Finding("redis advisories", Level.OK, f"none that was known on {LISTED_ON}")
    listed = "; ".join(f"{', '.join(advisory.cves)} ({advisory.published}): {advisory.what}" for advisory in found)
    fix = (
        f"install {_safe_version(version, found, table)} or later; a distribution may have mended its package under "
        "the old number, which its changelog tells"
    )
    return Finding("redis advisories", Level.WARNING, f"known on {LISTED_ON}: {listed}", fix)


def _safe_version(version: ServerVersion, found: Sequence[Advisory], table: Sequence[Advisory]) -> str:
    """The first of its own series without what was found; of the newest one where that series got no fix."""
    series = version.series
    if not all(series in advisory.fixed for advisory in found):
        series = max(max(advisory.fixed) for advisory in table)
    patch = max(advisory.fixed.get(series, 0) for advisory in table)
    return f"{version.product} {series[0]}.{series[1]}.{patch}"


def _role(info: Mapping[str, str]) -> Finding:
    if info.get("role") != "slave":
        return Finding("redis role", Level.OK, f"primary, with {info.get('connected_slaves', '0')} replicas")
    primary = f"{info.get('master_host')}:{info.get('master_port')}"
    if info.get("slave_read_only") == "1":
        return Finding("redis role", Level.FAILED, f"a replica of {primary}: it takes no writes", "use the primary")
    return Finding("redis role", Level.FAILED, f"a replica of {primary}, which will undo its writes", "use the primary")


@dataclass(frozen=True, slots=True)
class Advisory:
    """Holes that one security release closed, in each series that got one."""

    cves: tuple[str, ...]
    published: str  # YYYY-MM-DD
    what: str  # who may do what
    fixed: Mapping[Series, int]  # series -> its first version without them: {(7, 4): 6} is 7.4.6
    since: Series = (0, 0)  # older series never had them

    def affects(self, number: tuple[int, int, int]) -> bool:
        """Whether this version has them. A series beyond the newest one fixed was born without."""
        series, patch = number[:2], number[2]
        if series < self.since:
            return False
        return patch < self.fixed[series] if series in self.fixed else series < max(self.fixed)


REDIS = (
    Advisory(("CVE-2024-31449",), "2024-10-02", _LUA_STACK, {(6, 2): 16, (7, 2): 6, (7, 4): 1}),
    Advisory(("CVE-2024-46981",), "2025-01-06", _LUA_COLLECTOR, {(6, 2): 17, (7, 2): 7, (7, 4): 2}),
    Advisory(("CVE-2025-21605",), "2025-04-23", _OUTPUT_BUFFERS, {(6, 2): 18, (7, 2): 8, (7, 4): 3}),
    Advisory(("CVE-2025-48367",), "2025-07-06", _CONNECTIONS, {(6, 2): 19, (7, 2): 10, (7, 4): 5, (8, 0): 3}),
    Advisory(_LUA_2025_CVES, "2025-10-03", _LUA_2025, {(6, 2): 20, (7, 2): 11, (7, 4): 6, (8, 0): 4, (8, 2): 2}),
    Advisory(
        ("CVE-2026-23479", "CVE-2026-23631"),
        "2026-05-05",
        _UNBLOCKING,
        {(7, 2): 14, (7, 4): 9, (8, 2): 6, (8, 4): 3, (8, 6): 3},
        since=(7, 0),
    ),
    Advisory(
        ("CVE-2026-25243", "CVE-2026-66373"),  # the fix of the first, in May, was not complete
        "2026-07-23",
        _RESTORE,
        {(6, 2): 23, (7, 2): 15, (7, 4): 10, (8, 2): 8, (8, 4): 5, (8, 6): 5},
    ),
    Advisory(
        ("CVE-2026-81934",),
        "2026-08-18",
        _TLS,
        {(6, 2): 24, (7, 2): 16, (7, 4): 11, (8, 2): 9, (8, 4): 6, (8, 6): 6, (8, 8): 2, (8, 10): 1},
    ),
)

VALKEY = (
    Advisory(("CVE-2024-31449",), "2024-10-02", _LUA_STACK, {(7, 2): 7, (8, 0): 1}),
    Advisory(("CVE-2024-46981",), "2025-01-06", _LUA_COLLECTOR, {(7, 2): 8, (8, 0): 2}),
    Advisory(("CVE-2025-21605",), "2025-04-23", _OUTPUT_BUFFERS, {(7, 2): 9, (8, 0): 3, (8, 1): 1}),
    Advisory(_LUA_2025_CVES, "2025-10-03", _LUA_2025, {(7, 2): 11, (8, 0): 6, (8, 1): 4}),
    Advisory(("CVE-2025-67733",), "2026-02-23", _LUA_ERRORS, {(7, 2): 12, (8, 0): 7, (8, 1): 6, (9, 0): 3}),
    Advisory(
        ("CVE-2026-23479", "CVE-2026-23631"),
        "2026-05-05",
        _UNBLOCKING,
        {(7, 2): 13, (8, 0): 9, (8, 1): 7, (9, 0): 4},
    ),
    Advisory(
        ("CVE-2026-25243", "CVE-2026-63639"),
        "2026-07-21",
        _RESTORE,
        {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1},
    ),
    Advisory(("CVE-2026-56684",), "2026-07-21", _TLS_KILL, {(7, 2): 14, (8, 0): 10, (8, 1): 9, (9, 0): 5, (9, 1): 1}),
)


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
        ("HGETALL", keys.admission),
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
