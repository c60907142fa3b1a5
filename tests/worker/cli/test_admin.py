"""The operator's commands: `millrace doctor`, `acl`, `flower` and `worker`."""

from __future__ import annotations

import hashlib
import json
import signal
import stat
import subprocess
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from engine.loading.quantization_error import QuantizationError
from settings import EffectiveSettings
from tests.support.redis_servers import free_port
from tests.support.request_lines import chat_line, completion_line
from tests.support.workers import COMMAND, ROOT, millrace
from worker.cli import admin
from worker.cli.exit_codes import BadUsage
from worker.cli.main import cli


def run_acl(tmp_path: Path, *options: str) -> Result:
    files = ["--producer-password-file", str(tmp_path / "producer"), "--worker-password-file", str(tmp_path / "worker")]
    return CliRunner().invoke(admin.acl, [*files, *options], standalone_mode=False)


def test_the_file_holds_the_digests_of_the_passwords_and_not_the_passwords(tmp_path: Path) -> None:
    result = run_acl(tmp_path, "--generate", "--admin-password-file", str(tmp_path / "admin"))

    assert result.exit_code == 0, result.exception
    lines = result.stdout.splitlines()
    assert [line.split()[1] for line in lines] == [
        "default",
        "millrace-health",
        "millrace-producer",
        "millrace-worker",
        "millrace-admin",
    ]
    for line, name in zip(lines[2:], ("producer", "worker", "admin"), strict=True):
        password = (tmp_path / name).read_text().strip()
        assert f" #{hashlib.sha256(password.encode()).hexdigest()} " in line
        assert password not in result.output


def test_once_more_is_the_same_file(tmp_path: Path) -> None:
    assert run_acl(tmp_path, "--generate").stdout == run_acl(tmp_path, "--generate").stdout == run_acl(tmp_path).stdout


def test_it_is_written_where_it_is_wanted(tmp_path: Path) -> None:
    expected = run_acl(tmp_path, "--generate").stdout

    assert run_acl(tmp_path, "-o", str(tmp_path / "users.acl")).exit_code == 0
    assert (tmp_path / "users.acl").read_text() == expected


def test_without_a_password_there_is_no_acl_file(tmp_path: Path) -> None:
    result = run_acl(tmp_path)

    assert "producer: No such file" in str(result.exception)
    assert "--generate" in str(result.exception)
    assert result.stdout == ""


def test_two_users_with_one_password_are_refused(tmp_path: Path) -> None:
    (tmp_path / "producer").write_text("the same password\n")
    (tmp_path / "worker").write_text("the same password\n")

    assert "two users have the same password" in str(run_acl(tmp_path).exception)


def test_a_redis_that_is_too_old_is_refused(tmp_path: Path) -> None:
    for version in ("6.0", "five", "7", ""):
        assert "accepted: 6.2 or later" in str(run_acl(tmp_path, "--generate", "--redis-version", version).exception)


def run_doctor(*arguments: str) -> tuple[int, dict[str, dict[str, str]]]:
    result = CliRunner().invoke(admin.doctor, [*arguments, "--json"])
    return result.exit_code, {finding["check"]: finding for finding in json.loads(result.stdout)}


def test_a_complete_installation_is_well(redis_url: str, checkpoint: Path) -> None:
    code, findings = run_doctor("--redis-url", redis_url, "--model", str(checkpoint), "--set", "engine.device=cpu")

    assert code == 0
    for check in (
        *("redis", "redis version", "redis role", "redis eviction", "redis memory", "redis latency", "clock"),
        *("redis permissions", "workers", "torch", "triton", "device", "kernels", "kernel run", "cpu", "threads"),
        *("memory", "model", "tokenizer", "fit", "chat template"),
    ):
        assert findings[check]["level"] == "ok", findings[check]


def test_warnings_alone_are_no_failure_and_each_has_its_fix(redis_url: str) -> None:
    code, findings = run_doctor("--redis-url", redis_url)  # without an append-only file, without a model

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


def test_the_last_line_counts_the_findings_and_names_what_is_not_well(redis_url: str) -> None:
    lines = CliRunner().invoke(admin.doctor, ["--redis-url", redis_url]).stdout.splitlines()

    counts = [sum(line.startswith(level) for line in lines[:-1]) for level in ("ok", "warning", "failed")]
    named = ", ".join(line[8:].partition(":")[0].strip() for line in lines[:-1] if line.startswith("warning"))
    assert lines[-1] == f"{counts[0]} ok, {counts[1]} warning ({named}), {counts[2]} failed"
    assert "redis persistence" in named


def test_a_model_that_cannot_run_is_exit_1(redis_url: str, tmp_path: Path) -> None:
    code, findings = run_doctor("--redis-url", redis_url, "--model", str(tmp_path))

    assert code == 1
    assert findings["model"]["level"] == "failed"


def test_the_quantization_error_is_measured_where_it_is_asked_for(
    redis_url: str, checkpoint: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked: list[EffectiveSettings] = []

    def measure(effective: EffectiveSettings) -> QuantizationError:
        asked.append(effective)
        return QuantizationError(0.25, 0.0314, 0.96875)

    monkeypatch.setattr("worker.doctor.model.measure_quantization_error", measure)
    arguments = ["--redis-url", redis_url, "--model", str(checkpoint), "--set", "engine.quantization=int8"]

    assert "quantization" not in run_doctor(*arguments)[1]
    finding = run_doctor(*arguments, "--quantization-error")[1]["quantization"]

    assert finding["detail"].startswith("int8: logits are off by 0.031 on average")
    assert [effective.settings.engine.quantization for effective in asked] == ["int8"]


def test_without_a_model_there_is_no_quantization_error_to_measure() -> None:
    result = CliRunner().invoke(admin.doctor, ["--quantization-error"], standalone_mode=False)

    assert isinstance(result.exception, BadUsage)
    assert "--model DIR" in str(result.exception)


def test_a_producer_without_torch_is_told_so(redis_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "torch", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)

    code, findings = run_doctor("--redis-url", redis_url)

    assert code == 0
    assert "can submit jobs, not run them" in findings["torch"]["detail"]


def flower(*options: str | Path) -> Result:
    return CliRunner().invoke(cli, ["flower", *map(str, options)], standalone_mode=False)


def test_it_is_not_served_without_a_password() -> None:
    assert "Missing parameter: password_file" in str(flower().exception)


def test_a_password_that_is_none_is_refused(tmp_path: Path) -> None:
    (tmp_path / "password").write_text("short\n")

    assert "16 characters" in str(flower("--password-file", tmp_path / "password").exception)


def test_flower_refuses_an_open_redis_and_makes_a_private_password(
    tmp_path: Path,
) -> None:
    refused = flower("--password-file", tmp_path / "password", "--redis-url", "redis://elsewhere/0")

    assert "redis.url=redis://elsewhere/0: on another machine and without a password" in str(refused.exception)
    assert stat.S_IMODE((tmp_path / "password").stat().st_mode) == 0o600


def test_it_needs_no_torch() -> None:
    code = "import sys, worker.monitor.flower; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, cwd=ROOT)


def test_a_worker_runs_a_submitted_job_and_stops_on_sigterm(redis_url: str, checkpoint: Path, tmp_path: Path) -> None:
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_bytes(b"\n".join([completion_line(max_tokens=2), chat_line(max_tokens=2), completion_line(n=0)]))
    command = [*COMMAND, "worker", "--model", str(checkpoint), "--redis-url", redis_url]
    output = tmp_path / "stdout"
    with (
        (tmp_path / "log").open("wb") as log,
        output.open("wb") as stdout,
        subprocess.Popen(command, stdout=stdout, stderr=log) as worker,
    ):
        submitted = millrace("submit", requests, "--wait", "-o", results, "--redis-url", redis_url)
        worker.send_signal(signal.SIGTERM)
        code = worker.wait(timeout=60)

    assert submitted.returncode == 0, submitted.stderr
    assert code == 0, (tmp_path / "log").read_text()
    assert output.read_bytes() == b""  # stdout is for data, whatever Celery would like to say there
    records = [json.loads(line) for line in results.read_bytes().splitlines()]
    assert {record["custom_id"]: record["response"]["status_code"] for record in records} == {
        "line-1": 200,
        "line-2": 200,
        "line-3": 400,
    }
    job_id = submitted.stdout.decode().strip()
    status = json.loads(millrace("status", job_id, "--json", "--redis-url", redis_url).stdout)
    assert status["request_counts"] == {"total": 3, "completed": 2, "failed": 1}
    said = submitted.stderr.decode()
    assert "completed 3/3 (100%)" in said
    assert "completed: 2 completed, 1 failed, of 3 requests\n1 of 3 requests failed; millrace errors" in said


def test_no_redis_is_one_line_and_exit_1(checkpoint: Path) -> None:
    done = millrace("worker", "--model", checkpoint, "--redis-url", f"redis://127.0.0.1:{free_port()}/0")

    assert done.returncode == 1
    assert b"millrace: Redis at redis://" in done.stderr


def test_no_model_is_one_line_and_exit_1(redis_url: str, tmp_path: Path) -> None:
    done = millrace("worker", "--model", tmp_path, "--redis-url", redis_url)

    assert done.returncode == 1
    assert b"config.json" in done.stderr.splitlines()[-1]


def test_a_wrong_setting_is_exit_2(checkpoint: Path) -> None:
    assert millrace("worker", "--model", checkpoint, "--concurrency", "many").returncode == 2


def test_a_remote_redis_without_a_password_is_exit_2_before_loading(checkpoint: Path) -> None:
    done = millrace("worker", "--model", checkpoint, "--redis-url", "redis://redis.example:6379/0")

    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        b"millrace: redis.url=redis://redis.example:6379/0: on another machine and without a password;"
    )
    assert b"redis.allow_unauthenticated=true" in last
