from __future__ import annotations

import pytest

from tests.support.doctor import configured, found_at
from worker.doctor.report import Level


@pytest.mark.parametrize(("maxmemory", "level"), [("0", Level.WARNING), ("100mb", Level.FAILED)])
def test_an_evicting_redis_is_as_bad_as_its_memory_is_bounded(redis_url: str, maxmemory: str, level: Level) -> None:
    with configured(redis_url, maxmemory=maxmemory, maxmemory_policy="allkeys-lru"):
        finding = found_at(redis_url)["redis eviction"]

    assert finding.level is level
    assert "CONFIG SET maxmemory-policy noeviction" in str(finding.fix)


@pytest.mark.parametrize(("share", "level"), [(0.5, Level.OK), (0.87, Level.WARNING), (0.98, Level.FAILED)])
def test_memory_that_runs_out_is_said_before_it_has(redis_url: str, share: float, level: Level) -> None:
    with configured(redis_url, maxmemory="0") as client:
        client.set("filling", "x" * (20 << 20))  # so that what this test itself takes is little
        used = int(client.info("memory")["used_memory"])
        client.config_set("maxmemory", int(used / share))
        finding = found_at(redis_url)["redis memory"]

    assert finding.level is level, finding
    assert ("limits.max_open_bytes" in str(finding.fix)) is (level is not Level.OK)


def test_a_limit_beyond_what_the_machine_has_is_no_limit(redis_url: str) -> None:
    with configured(redis_url, maxmemory="100000gb"):
        finding = found_at(redis_url)["redis memory"]

    assert finding.level is Level.WARNING
    assert "the kernel will end Redis first" in finding.detail


def test_without_a_limit_the_machines_memory_counts(redis_url: str) -> None:
    finding = found_at(redis_url)["redis memory"]

    assert finding.level is Level.OK
    assert "maxmemory is not set" in finding.detail
