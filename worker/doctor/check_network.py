"""How far away Redis is, and whether its clock and ours agree."""

from __future__ import annotations

from collections.abc import Iterator

from worker.doctor.finding import Finding
from worker.doctor.level import Level
from worker.doctor.redis_facts import NUM_ROUND_TRIPS, RedisFacts

# Claiming a shard, writing its records and ending it are a round trip each; on one machine it takes 0.1 ms.
SLOW_ROUND_TRIP_S = 0.02
# Within a second the records of several machines can still be laid side by side.
CLOCK_TOLERANCE_S = 1.0


def network_findings(facts: RedisFacts) -> Iterator[Finding]:
    """Round trip and clock."""
    detail = f"{facts.round_trip_s * 1000:.2f} ms, the median of {NUM_ROUND_TRIPS} round trips"
    if facts.round_trip_s < SLOW_ROUND_TRIP_S:
        yield Finding("redis latency", Level.OK, detail)
    else:
        fix = "run Redis nearer to its workers; see redis-cli --latency and SLOWLOG GET for what else keeps it busy"
        yield Finding("redis latency", Level.WARNING, f"{detail}: claims and records wait for it", fix)
    yield _clock(facts.clock_offset_s)


def _clock(offset_s: float) -> Finding:
    detail = f"Redis's is {abs(offset_s) * 1000:,.0f} ms {'ahead of' if offset_s >= 0 else 'behind'} this machine's"
    if abs(offset_s) <= CLOCK_TOLERANCE_S:
        return Finding("clock", Level.OK, detail)
    return Finding(
        "clock",
        Level.WARNING,
        f"{detail}: logs, spans and the order of job ids do not fit together, and certificates may seem out of date; "
        "leases, deadlines and ageing go by Redis's clock alone",
        "set both machines' clocks by NTP (timedatectl set-ntp true)",
    )
