"""What `millrace doctor` says of the Redis server: version, role, memory and persistence."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.processes import redis_executable, wait_until
from tests.support.redis_servers import (
    configured,
    found_at,
    free_port,
    private_redis,
    restartable_redis,
    wait_until_it_answers,
)
from worker.doctor.redis import server_findings
from worker.doctor.report import Finding, Level


@contextmanager
def server(directory: Path, *options: str) -> Iterator[str]:
    # A cluster's bus is 10,000 above: there, too, below the ports of outgoing connections, and in this process's share.
    port = next(port for port in iter(free_port, None) if port < 22_000)
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(directory), "--save", "", *options]
    with subprocess.Popen([redis_executable(), *arguments], stdout=subprocess.DEVNULL) as process:
        try:
            wait_until_it_answers(port, process)
            yield f"redis://127.0.0.1:{port}/0"
        finally:
            process.terminate()


def found(**info: str) -> dict[str, Finding]:
    return {finding.check: finding for finding in server_findings({"role": "master", **info})}


@pytest.mark.parametrize(
    ("text", "level"),
    [
        ("6.2.14", Level.OK),
        ("8.10.1", Level.OK),
        ("7.4", Level.OK),
        ("6.0.20", Level.FAILED),
        ("7.9.240-rc1", Level.OK),
        ("7", Level.OK),
        ("unknown", Level.FAILED),
    ],
)
def test_a_server_fails_by_what_it_says_of_its_age(text: str, level: Level) -> None:
    assert found(redis_version=text)["redis version"].level is level


def test_a_server_that_celery_does_not_support_fails() -> None:
    finding = found(redis_version="6.0.16")["redis version"]

    assert (finding.level, finding.detail) == (Level.FAILED, "Redis 6.0.16 is too old")
    assert finding.fix == "install Redis 6.2 or later"


def test_valkey_is_told_from_the_redis_it_claims_to_be() -> None:
    finding = found(redis_version="7.2.4", server_name="valkey", valkey_version="8.1.3")["redis version"]

    assert (finding.level, finding.detail) == (Level.OK, "Valkey 8.1.3")


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
            wait_until(lambda: primary.wait(1, 1000) == 1)  # for a replica
        assert found_at(primary_url)["redis role"].detail == "primary, with 1 replicas"


def test_a_cluster_fails(tmp_path: Path) -> None:
    with server(tmp_path, "--cluster-enabled", "yes") as url:
        findings = found_at(url)

    assert findings["redis cluster"].level is Level.FAILED
    assert "cluster-enabled no" in str(findings["redis cluster"].fix)
    assert findings["redis queue"].level is Level.FAILED  # no slot of this one is served


def test_a_real_server_tells_its_version(redis_url: str) -> None:
    with redis.Redis.from_url(redis_url) as client:
        version = client.info()["redis_version"]

    finding = found_at(redis_url)["redis version"]

    assert (finding.level, finding.detail) == (Level.OK, f"Redis {version}")


def test_without_an_append_only_file_a_restart_loses_everything(redis_url: str) -> None:
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
