"""What compose.yaml runs, run here without containers: the same commands, files and settings."""

from __future__ import annotations

import re
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import redis
import yaml

from settings import load_settings
from tests.support.free_port import free_port
from tests.support.millrace import ROOT, millrace
from tests.support.redis_server import redis_executable
from worker.client import BatchClient
from worker.registry.connect import connect


def services(name: str) -> dict[str, Any]:
    # Compose's own tag: the list stands in place of the other file's.
    found: dict[str, Any] = yaml.safe_load((ROOT / name).read_text().replace("!override", ""))["services"]
    return found


@contextmanager
def running(command: list[str]) -> Iterator[None]:
    with subprocess.Popen(command, stdout=subprocess.DEVNULL) as process:
        try:
            yield
        finally:
            process.terminate()


def test_its_acl_command_its_redis_and_its_workers_settings_fit_together(tmp_path: Path) -> None:
    compose = services("compose.yaml")
    for folder in ("acl", "secrets/producer", "secrets/worker", "secrets/admin"):
        (tmp_path / folder).mkdir(parents=True)
    port = free_port()

    def here(text: str) -> str:
        return re.sub(r"/(acl|secrets)/", rf"{tmp_path}/\1/", text).replace("@redis:6379", f"@127.0.0.1:{port}")

    made = millrace(*map(here, compose["acl"]["command"]))
    assert made.returncode == 0, made.stderr.decode()
    _, *options = compose["redis"]["command"]
    arguments = ["--port", str(port), "--bind", "127.0.0.1", "--dir", str(tmp_path), *map(here, options)]
    environment = {name: here(value) for name, value in compose["worker"]["environment"].items() if "REDIS" in name}
    worker = load_settings(environ=environment).settings.redis
    producer = worker.model_copy(
        update={"url": type(worker.url)(f"redis://millrace-producer@127.0.0.1:{port}/0")}
        | {"password_file": tmp_path / "secrets/producer/password"}
    )
    with running([redis_executable(), *arguments]):
        with connect(worker) as client:
            _wait(client)
            assert client.info("persistence")["aof_enabled"] == 1
            assert client.info("memory")["maxmemory_policy"] == "noeviction"
        with BatchClient(producer) as batch:
            assert batch.status(batch.submit([{"prompt": "Hello"}])).request_counts.total == 1
        with redis.Redis(port=port) as nobody, pytest.raises(redis.AuthenticationError):
            nobody.ping()


@pytest.mark.parametrize("name", ["compose.yaml", "worker/compose.tls.yaml"])
def test_it_names_only_settings_that_exist_and_holds_no_password(name: str) -> None:
    environment = services(name)["worker"]["environment"]
    settings = load_settings(
        environ={key: value.replace("${MODEL_NAME:-model}", "m") for key, value in environment.items()}
    )
    assert settings.settings.redis.allow_unauthenticated is False
    text = (ROOT / name).read_text()
    assert not re.search(r"requirepass|redis(s)?://[^@\s]*:[^@\s]*@|PASSWORD:", text)


def test_what_must_be_given_is_asked_for() -> None:
    assert "${MODEL_DIR:?" in (ROOT / "compose.yaml").read_text()
    assert "${TLS_DIR:?" in (ROOT / "worker/compose.tls.yaml").read_text()


def test_the_encrypted_redis_is_the_other_one_with_tls_and_no_plain_port() -> None:
    plain = services("compose.yaml")["redis"]["command"]
    encrypted = services("worker/compose.tls.yaml")["redis"]["command"]
    assert encrypted[: len(plain)] == plain
    assert encrypted[len(plain) :][:2] == ["--port", "0"]


def test_only_the_encrypted_redis_is_published_to_other_machines() -> None:
    assert services("compose.yaml")["redis"]["ports"] == ["127.0.0.1:6379:6379"]
    assert services("worker/compose.tls.yaml")["redis"]["ports"] == ["6379:6379"]
    # Merged without the tag, both would be published, of which one address is part of the other.
    assert "ports: !override\n" in (ROOT / "worker/compose.tls.yaml").read_text()


def _wait(client: redis.Redis) -> None:
    until_s = time.monotonic() + 20.0
    while True:
        try:
            client.ping()
        except redis.RedisError:
            if time.monotonic() > until_s:
                raise
        else:
            return
