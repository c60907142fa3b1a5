"""Whether Redis has memory for the jobs, and what it does when it has none left."""

from __future__ import annotations

from collections.abc import Iterator

from worker.doctor.finding import Finding
from worker.doctor.level import Level
from worker.doctor.redis_facts import RedisFacts

_GETTING_FULL = 0.8
_FULL = 0.95


def memory_findings(facts: RedisFacts) -> Iterator[Finding]:
    """Eviction policy, then use against the limit."""
    yield _eviction(facts)
    yield _use(facts)


def _eviction(facts: RedisFacts) -> Finding:
    policy = facts.info.get("maxmemory_policy", "unknown")
    if policy == "noeviction":
        return Finding("redis eviction", Level.OK, "noeviction")
    return Finding(
        "redis eviction",
        Level.FAILED if facts.count("maxmemory") else Level.WARNING,
        f"{policy}: under memory pressure Redis drops jobs and results",
        "redis-cli CONFIG SET maxmemory-policy noeviction, and the same in redis.conf",
    )


def _use(facts: RedisFacts) -> Finding:
    used, limit, machine = (facts.count(name) for name in ("used_memory", "maxmemory", "total_system_memory"))
    if limit and machine and limit > machine:
        return Finding(
            "redis memory",
            Level.WARNING,
            f"maxmemory is {_mib(limit)}, its machine has {_mib(machine)}: the kernel will end Redis first",
            f"redis-cli CONFIG SET maxmemory {machine // 2}, and the same in redis.conf",
        )
    most = limit or machine
    share = used / most if most else 0.0
    of_what = "maxmemory" if limit else "its machine's memory (maxmemory is not set)"
    detail = f"{_mib(used)} of {_mib(most)}, {of_what}" if most else f"{_mib(used)}; maxmemory is not set"
    if share < _GETTING_FULL:
        return Finding("redis memory", Level.OK, detail)
    level = Level.FAILED if share >= _FULL else Level.WARNING
    fix = "raise maxmemory, or lower redis.result_ttl_s, limits.max_open_bytes or limits.max_open_jobs"
    return Finding("redis memory", level, f"{detail}: when it is full, no job is accepted and no record written", fix)


def _mib(num_bytes: int) -> str:
    return f"{num_bytes / 2**20:,.0f} MiB"
