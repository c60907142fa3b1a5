from __future__ import annotations

import json
from pathlib import Path

import pytest
import redis
from click.testing import CliRunner

from settings import RedisSettings
from tests.support.free_port import free_port
from worker.cli.doctor import command
from worker.cli.finding import Finding
from worker.cli.level import Level
from worker.cli.redis_checks import redis_findings


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(command, [*arguments, "--json"])
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_a_complete_installation_is_well(redis_url: str, checkpoint: Path) -> None:
    code, findings = doctor("--redis-url", redis_url, "--model", str(checkpoint))

    assert code == 0
    for check in ("redis", "redis version", "redis eviction", "torch", "device", "kernels", "model", "kv cache"):
        assert findings[check]["level"] == "ok", findings[check]


def test_redis_without_an_append_only_file_is_a_warning_with_its_fix(redis_url: str) -> None:
    _, findings = doctor("--redis-url", redis_url)

    assert findings["redis persistence"]["level"] == "warning"
    assert "appendonly yes" in findings["redis persistence"]["fix"]


def test_an_unreachable_redis_is_exit_1_and_shows_no_password() -> None:
    url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"

    result = CliRunner().invoke(command, ["--redis-url", url])

    assert result.exit_code == 1
    assert "failed   redis: " in result.stdout
    assert "fix: start redis-server" in result.stdout
    assert "hunter2" not in result.output


def test_a_model_that_cannot_run_is_exit_1(redis_url: str, tmp_path: Path) -> None:
    code, findings = doctor("--redis-url", redis_url, "--model", str(tmp_path))

    assert code == 1
    assert findings["model"]["level"] == "failed"


@pytest.mark.parametrize(("maxmemory", "level"), [("0", Level.WARNING), ("100mb", Level.FAILED)])
def test_an_evicting_redis_is_as_bad_as_its_memory_is_bounded(redis_url: str, maxmemory: str, level: Level) -> None:
    with redis.Redis.from_url(redis_url) as client:
        client.config_set("maxmemory", maxmemory)
        client.config_set("maxmemory-policy", "allkeys-lru")
        try:
            findings = {finding.check: finding for finding in findings_of(redis_url)}
        finally:
            client.config_set("maxmemory", "0")
            client.config_set("maxmemory-policy", "noeviction")

    assert findings["redis eviction"].level is level
    assert "noeviction" in str(findings["redis eviction"].fix)


def findings_of(url: str) -> list[Finding]:
    return list(redis_findings(RedisSettings.model_validate({"url": url}, strict=False), url))
