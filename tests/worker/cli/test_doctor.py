from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner

from tests.support.free_port import free_port
from worker.cli import admin


def doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(admin.doctor, [*arguments, "--json"])
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_a_complete_installation_is_well(redis_url: str, checkpoint: Path) -> None:
    code, findings = doctor("--redis-url", redis_url, "--model", str(checkpoint), "--set", "engine.device=cpu")

    assert code == 0
    for check in (
        *("redis", "redis version", "redis role", "redis eviction", "redis memory", "redis latency", "clock"),
        *("redis permissions", "workers", "torch", "triton", "device", "kernels", "kernel run", "cpu", "threads"),
        *("memory", "model", "tokenizer", "fit", "chat template"),
    ):
        assert findings[check]["level"] == "ok", findings[check]


def test_warnings_alone_are_no_failure_and_each_has_its_fix(redis_url: str) -> None:
    code, findings = doctor("--redis-url", redis_url)  # without an append-only file, without a model

    assert code == 0
    assert findings["redis persistence"]["level"] == findings["model"]["level"] == "warning"
    assert all(finding["fix"] for finding in findings.values() if finding["level"] != "ok")
    assert not any(finding["fix"] for finding in findings.values() if finding["level"] == "ok")


def test_an_unreachable_redis_is_exit_1_and_shows_no_password() -> None:
    url = f"redis://:hunter2@127.0.0.1:{free_port()}/0"

    result = CliRunner().invoke(admin.doctor, ["--redis-url", url])

    assert result.exit_code == 1
    assert "failed   redis: " in result.stdout
    assert "fix: start redis-server" in result.stdout
    assert "hunter2" not in result.output


def test_the_last_line_counts_the_findings(redis_url: str) -> None:
    lines = CliRunner().invoke(admin.doctor, ["--redis-url", redis_url]).stdout.splitlines()

    counts = [sum(line.startswith(level) for line in lines[:-1]) for level in ("ok", "warning", "failed")]
    assert lines[-1] == f"{counts[0]} ok, {counts[1]} warning, {counts[2]} failed"


def test_a_model_that_cannot_run_is_exit_1(redis_url: str, tmp_path: Path) -> None:
    code, findings = doctor("--redis-url", redis_url, "--model", str(tmp_path))

    assert code == 1
    assert findings["model"]["level"] == "failed"


def test_a_producer_without_torch_is_told_so(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    code, findings = doctor("--redis-url", redis_url)

    assert code == 0
    assert "can submit jobs, not run them" in findings["torch"]["detail"]
