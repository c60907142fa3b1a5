"""Whether jobs and results outlive a restart of Redis, and whether it could write them last time."""

from __future__ import annotations

from collections.abc import Iterator

from worker.doctor.finding import Finding
from worker.doctor.level import Level
from worker.doctor.redis_facts import RedisFacts

_TURN_ON = "redis-cli CONFIG SET appendonly yes, and appendonly yes in redis.conf"
_DISK = "free space on Redis's disk and see its log"


def persistence_findings(facts: RedisFacts) -> Iterator[Finding]:
    """What is kept on disk, then every write to it that failed."""
    yield _append_only(facts)
    info = facts.info
    if info.get("aof_enabled") == "1" and info.get("aof_last_write_status", "ok") != "ok":
        yield Finding("redis disk", Level.FAILED, "the last append failed: Redis refuses to write", _DISK)
    if info.get("aof_enabled") == "1" and info.get("aof_last_bgrewrite_status", "ok") != "ok":
        yield Finding("redis disk", Level.WARNING, "the append-only file could not be rewritten: it grows", _DISK)
    if info.get("rdb_last_bgsave_status", "ok") != "ok":
        yield _failed_snapshot(facts)


def _append_only(facts: RedisFacts) -> Finding:
    if facts.info.get("aof_enabled") != "1":
        kept = "what came after the last snapshot" if facts.config.get("save") else "all jobs and results"
        if not facts.config:
            kept = "what came after the last snapshot, or everything where there is none"
        detail = f"append-only file is off: a restart of Redis loses {kept}"
        return Finding("redis persistence", Level.WARNING, detail, _TURN_ON)
    flushed = facts.config.get("appendfsync")
    if flushed == "no":
        return Finding(
            "redis persistence",
            Level.WARNING,
            "append-only file is on and flushed when the kernel likes: a power failure loses half a minute",
            "redis-cli CONFIG SET appendfsync everysec, and the same in redis.conf",
        )
    how = f", appendfsync {flushed}" if flushed else "; appendfsync is not shown to this user"
    return Finding("redis persistence", Level.OK, f"append-only file is on{how}")


def _failed_snapshot(facts: RedisFacts) -> Finding:
    # Redis refuses writes only where it is told to save by itself, which it is by default.
    refuses = facts.config.get("save") != "" and facts.config.get("stop-writes-on-bgsave-error") != "no"
    level = Level.FAILED if refuses else Level.WARNING
    return Finding(
        "redis disk", level, f"the last snapshot failed{': Redis refuses to write' if refuses else ''}", _DISK
    )
