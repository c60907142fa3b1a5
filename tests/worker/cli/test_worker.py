"""`millrace worker` as a process: that it starts, works and stops. What it does in between has tests of its own."""

from __future__ import annotations

import json
import signal
import subprocess
from pathlib import Path

from tests.support.free_port import free_port
from tests.support.millrace import COMMAND, millrace
from tests.support.request_lines import chat_line, completion_line


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


def test_another_machines_redis_without_a_password_is_exit_2_before_anything_is_loaded(checkpoint: Path) -> None:
    done = millrace("worker", "--model", checkpoint, "--redis-url", "redis://redis.example:6379/0")

    assert done.returncode == 2
    last = done.stderr.splitlines()[-1]
    assert last.startswith(
        b"millrace: redis.url=redis://redis.example:6379/0: on another machine and without a password;"
    )
    assert b"redis.allow_unauthenticated=true" in last
