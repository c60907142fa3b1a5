from __future__ import annotations

import socket
import time
from pathlib import Path

import pytest
import redis

from tests.support.acl_redis import acl_redis
from tests.support.doctor import facts_at, found_at, redis_settings
from tests.support.free_port import free_port
from tests.support.tls_front import HOST, tls_front
from worker.doctor.redis import redis_findings
from worker.doctor.redis_facts import RedisFacts
from worker.doctor.report import Level


def test_a_redis_that_is_not_there_is_said_at_once() -> None:
    started_s = time.monotonic()

    findings = found_at(f"redis://127.0.0.1:{free_port()}/0")

    assert time.monotonic() - started_s < 1
    assert list(findings) == ["redis"]
    assert findings["redis"].level is Level.FAILED
    assert "start redis-server there" in str(findings["redis"].fix)


def test_one_that_does_not_answer_is_given_up(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"redis://127.0.0.1:{silent.getsockname()[1]}/0"
        findings = found_at(url, socket_timeout_s=0.2)

    assert findings["redis"].level is Level.FAILED
    assert "Timeout" in findings["redis"].detail


def test_a_wrong_password_has_a_fix_of_its_own(tmp_path: Path) -> None:
    with acl_redis(tmp_path, port=free_port()) as server:
        findings = found_at(server.url("millrace-worker", "guessed"))

    assert list(findings) == ["redis"]
    assert "the password of the ACL file" in str(findings["redis"].fix)


def test_a_certificate_of_nobody_we_trust_has_a_fix_of_its_own(redis_url: str, tmp_path: Path) -> None:
    with tls_front(int(facts_at(redis_url).info["tcp_port"]), tmp_path / "ca.pem") as port:
        finding = found_at(f"rediss://{HOST}:{port}/0")["redis"]

    assert finding.level is Level.FAILED
    assert "redis.ca_file" in str(finding.fix)


def test_so_has_a_port_that_is_not_encrypted(redis_url: str) -> None:
    finding = found_at(redis_url.replace("redis://", "rediss://"), socket_timeout_s=1)["redis"]

    assert finding.level is Level.FAILED
    assert "if this port is not encrypted" in str(finding.fix), finding


def test_a_url_that_is_refused_is_a_finding_and_not_asked() -> None:
    findings = found_at("redis://redis.example:6379/0")

    assert list(findings) == ["redis"]
    assert "without a password" in findings["redis"].detail


def test_a_redis_that_still_reads_its_file_is_waited_for(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def is_loading(*_: object) -> None:
        raise redis.BusyLoadingError("Redis is loading the dataset in memory")

    monkeypatch.setattr(RedisFacts, "ask", is_loading)

    [finding] = redis_findings(redis_settings(redis_url), redis_url)

    assert finding.fix == "wait until it has read its file from disk"


def test_all_of_it_takes_less_than_a_second(redis_url: str) -> None:
    started_s = time.monotonic()
    found_at(redis_url)
    assert time.monotonic() - started_s < 1
