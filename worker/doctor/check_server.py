"""Which server it is, what is known against it, and whether it can hold a queue."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from worker.doctor.advisory import Advisory
from worker.doctor.finding import Finding
from worker.doctor.known_advisories import LISTED_ON, REDIS, VALKEY
from worker.doctor.level import Level
from worker.doctor.server_version import OLDEST_REDIS, ServerVersion


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
