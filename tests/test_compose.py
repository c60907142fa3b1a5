"""The commands, files and settings of compose.yaml, run here without containers."""

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
from tests.support.processes import redis_executable, server_version
from tests.support.redis_servers import free_port
from tests.support.workers import ROOT, millrace
from worker.client import BatchClient
from worker.registry.connect import connect
from worker.serve.app import STOP_TIMEOUT_S


def services(name: str) -> dict[str, Any]:
    """With the default of each variable that has one, as Compose fills them in."""
    text = re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", (ROOT / name).read_text())
    found: dict[str, Any] = yaml.safe_load(text)["services"]
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
    for volume in compose["acl"]["volumes"]:
        (tmp_path / volume.split(":/")[1]).mkdir(parents=True)
    port = free_port()

    def here(text: str) -> str:
        return re.sub(r"/(acl|secrets)/", rf"{tmp_path}/\1/", text).replace("@redis:6379", f"@127.0.0.1:{port}")

    # Compose's server is newer than the one that may be here, which refuses a file with commands that it does not know.
    version = ".".join(map(str, server_version(redis_executable())))
    made = millrace(*map(here, compose["acl"]["command"]), f"--redis-version={version}")
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
        with redis.Redis(port=port, username="millrace-health", password="any") as health:
            assert health.ping()
            with pytest.raises(redis.exceptions.NoPermissionError):
                health.keys()


@pytest.mark.parametrize("name", ["compose.yaml", "worker/compose.tls.yaml"])
def test_it_names_only_settings_that_exist_and_holds_no_password(name: str) -> None:
    settings = load_settings(environ=services(name)["worker"]["environment"]).settings
    assert settings.redis.allow_unauthenticated is False
    text = (ROOT / name).read_text()
    assert not re.search(r"requirepass|redis(s)?://[^@\s]*:[^@\s]*@|PASSWORD:", text)


@pytest.mark.parametrize("name", ["acl", "redis", "worker", "worker-gpu", "serve"])
def test_a_service_may_write_to_its_volumes_and_tmp_and_nowhere_else(name: str) -> None:
    service = services("compose.yaml")[name]
    assert service["read_only"] is True
    assert service["tmpfs"] == ["/tmp"]
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]


def test_the_server_names_known_settings_and_is_for_this_machine_alone() -> None:
    server = services("compose.yaml")["serve"]
    assert load_settings(environ=server["environment"]).settings.redis.password_file is not None
    assert server["ports"] == ["127.0.0.1:8000:8000"]
    grace_s = float(server["stop_grace_period"].removesuffix("s"))
    assert grace_s >= STOP_TIMEOUT_S + 10


def test_a_gpu_worker_adds_a_gpu_and_starts_only_when_asked_for() -> None:
    compose = services("compose.yaml")
    worker, gpu = compose["worker"], compose["worker-gpu"]
    own = {"profiles", "image", "build", "volumes", "deploy"}
    assert {key: value for key, value in gpu.items() if key not in own} == {
        key: value for key, value in worker.items() if key not in own
    }
    assert gpu["profiles"] == ["gpu"]
    assert gpu["volumes"][: len(worker["volumes"])] == worker["volumes"]
    assert "profiles" not in worker


def test_the_image_has_the_directories_whose_owner_the_volumes_take_over() -> None:
    made = (ROOT / "worker/Dockerfile").read_text()
    for name in ("acl", "worker-gpu", "serve"):
        targets = [volume.split(":")[1] for volume in services("compose.yaml")[name]["volumes"]]
        assert all(re.search(rf" {target}\b", made) for target in targets if target != "/model"), targets


def test_a_worker_has_longer_to_stop_than_it_takes() -> None:
    grace = services("compose.yaml")["worker"]["stop_grace_period"]
    assert float(grace.removesuffix("s")) >= load_settings(environ={}).settings.worker.drain_timeout_s + 10


def test_nothing_must_be_given_but_certificates() -> None:
    assert "${TLS_DIR:?" in (ROOT / "worker/compose.tls.yaml").read_text()
    assert ":?" not in (ROOT / "compose.yaml").read_text()
    model = services("compose.yaml")["worker"]["volumes"][0].split(":")[0]
    assert (ROOT / model / "config.json").is_file()


def test_the_encrypted_redis_is_the_other_one_with_tls_and_no_plain_port() -> None:
    plain = services("compose.yaml")["redis"]["command"]
    encrypted = services("worker/compose.tls.yaml")["redis"]["command"]
    assert encrypted[: len(plain)] == plain
    assert encrypted[len(plain) :][:2] == ["--port", "0"]


def test_only_the_encrypted_redis_is_published_to_other_machines() -> None:
    assert services("compose.yaml")["redis"]["ports"] == ["127.0.0.1:6379:6379"]
    # Beside the other, whose port it must not be: Compose publishes both.
    assert services("worker/compose.tls.yaml")["redis"]["ports"] == ["6380:6379"]


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
