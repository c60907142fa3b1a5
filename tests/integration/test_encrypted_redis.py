"""rediss:// from every program, and what a wrong key or certificate meets."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
import redis
import trustme
from pydantic import SecretStr

from settings import RedisSettings, Settings
from tests.support.redis_servers import AclRedis, acl_redis, free_port, tls_front
from tests.support.workers import millrace, worker_processes
from worker.app import create_app
from worker.client import BatchClient
from worker.registry.connect import connect


@dataclass(frozen=True)
class Encrypted:
    """The server of `acl_redis` behind TLS."""

    plain: AclRedis
    port: int
    ca_file: Path

    @property
    def producer_url(self) -> str:
        return self._encrypted(self.plain.producer_url)

    @property
    def worker_url(self) -> str:
        return self._encrypted(self.plain.worker_url)

    def _encrypted(self, url: str) -> str:
        return url.replace("redis://", "rediss://").replace(f":{self.plain.port}/", f":{self.port}/")


@pytest.fixture
def server(tmp_path: Path) -> Iterator[Encrypted]:
    """One for each test: Celery keeps a producer's connections for as long as the process lives."""
    directory = tmp_path / "tls"
    directory.mkdir()
    with (
        acl_redis(directory, port=free_port()) as plain,
        tls_front(plain.port, directory / "ca.pem") as port,
    ):
        yield Encrypted(plain, port, directory / "ca.pem")


def test_a_job_goes_through_encrypted_connections_alone(
    server: Encrypted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("MILLRACE_REDIS__URL", server.producer_url)
    monkeypatch.setenv("MILLRACE_REDIS__CA_FILE", str(server.ca_file))
    lines = tmp_path / "lines.jsonl"
    lines.write_text("\n".join(json.dumps({"prompt": f"prompt {number}"}) for number in range(30)))
    settings = RedisSettings(url=SecretStr(server.producer_url), ca_file=server.ca_file)
    with BatchClient(settings) as client, worker_processes(server.worker_url, tmp_path) as workers:
        workers.start(redis__ca_file=str(server.ca_file))
        workers.wait_up(client)
        job_id = client.submit([{"prompt": "Hello"}])
        assert client.wait(job_id, 30.0).request_counts.completed == 1
        done = millrace("submit", lines, "--wait", "-o", tmp_path / "results.jsonl")
    assert done.returncode == 0, done.stderr.decode()
    assert len((tmp_path / "results.jsonl").read_bytes().splitlines()) == 30


def test_a_certificate_of_a_stranger_is_refused_by_registry_and_broker(
    server: Encrypted, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pauses: list[float] = []
    monkeypatch.setattr("redis.retry.sleep", pauses.append)
    stranger = tmp_path / "stranger.pem"
    trustme.CA().cert_pem.write_to_path(str(stranger))
    for ca_file in (stranger, None):  # None: the authorities that the machine trusts
        settings = RedisSettings(url=SecretStr(server.producer_url), ca_file=ca_file)
        with connect(settings) as client, pytest.raises(redis.ConnectionError, match="CERTIFICATE_VERIFY_FAILED"):
            client.ping()
        assert pauses == []  # it is tried once
        app = create_app(Settings(redis=settings))
        with app.connection_for_write() as connection, pytest.raises(Exception, match="CERTIFICATE_VERIFY_FAILED"):
            connection.channel()


@pytest.mark.parametrize(
    ("command", "wrong", "reason"),
    [
        ("jobs", "ca", "CERTIFICATE_VERIFY_FAILED"),
        ("jobs", "password", "invalid username-password pair"),
        ("jobs", "user", "invalid username-password pair"),
        ("worker", "ca", "CERTIFICATE_VERIFY_FAILED"),
        ("worker", "password", "invalid username-password pair"),
    ],
)
def test_a_wrong_key_is_tried_once_and_is_one_line_without_the_password(
    server: Encrypted,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    tiny_model: Path,
    command: str,
    wrong: str,
    reason: str,
) -> None:
    ca_file = tmp_path / "ca.pem"
    trustme.CA().cert_pem.write_to_path(str(ca_file))
    user = "nobody" if wrong == "user" else "millrace-worker"
    monkeypatch.setenv("MILLRACE_REDIS__URL", f"rediss://{user}:hunter2@127.0.0.1:{server.port}/0")
    monkeypatch.setenv("MILLRACE_REDIS__CA_FILE", str(ca_file if wrong == "ca" else server.ca_file))
    arguments = ["worker", "--model", tiny_model] if command == "worker" else [command]
    connections = server.plain.admin.info()["total_connections_received"]

    done = millrace(*arguments)

    assert done.returncode == 1
    last = done.stderr.decode().splitlines()[-1]
    assert last.startswith(f"millrace: Redis at rediss://{user}:***@127.0.0.1:{server.port}/0: ")
    assert reason in last
    assert b"hunter2" not in done.stderr + done.stdout
    # No clock: on a busy machine torch alone takes ten seconds to import.
    assert server.plain.admin.info()["total_connections_received"] - connections <= 3
