"""The code on the pages for users does what they say, but for the address of Redis and the model's directory."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.pages.document_check import Markdown
from tests.support.workers import ONE_THREAD, ROOT, millrace, running_workers

CLIENT = ROOT / "worker" / "CLIENT.md"
FROM_VLLM = ROOT / "worker" / "FROM_VLLM.md"

REDIS = "redis://127.0.0.1:6379/0"
MODEL = "models/Qwen3-0.6B"

SHOWN = "import json as _json; print(_json.dumps([answers, counts.model_dump(), rest, stopped.status]))"

# As `vllm run-batch` writes them: a refusal of its server, one of the batch runner itself.
OF_VLLM = (
    {
        "id": "vllm-1",
        "custom_id": "too long",
        "response": {"status_code": 400, "request_id": "vllm-batch-1", "body": None},
        "error": {"error": {"message": "it is too long", "type": "BadRequestError", "param": None, "code": 400}},
    },
    {
        "id": "vllm-2",
        "custom_id": "elsewhere",
        "response": {"status_code": 400, "request_id": "vllm-batch-2", "body": None},
        "error": "URL /v1/nothing was used",
    },
)
OURS = {
    "id": "batch_req_1",
    "custom_id": "wrong",
    "response": {"status_code": 400, "request_id": "req_1", "body": {"error": {"message": "n is 0", "code": "x"}}},
    "error": None,
}
CANCELLED = {"id": "batch_req_2", "custom_id": "late", "response": None, "error": {"code": "x", "message": "cancelled"}}


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in their order."""
    return [piece.text for name, piece in Markdown(page.read_text()).fenced if name == language]


@pytest.fixture
def read_results() -> Callable[[Path], tuple[dict[str, str], dict[str, str]]]:
    """The page's own reader of results."""
    namespace: dict[str, Any] = {}
    (code,) = blocks(FROM_VLLM, "python")
    exec(code, namespace)
    reader: Callable[[Path], tuple[dict[str, str], dict[str, str]]] = namespace["read_results"]
    return reader


def test_the_page_of_the_client_is_a_program(redis_url: str, tiny_model: Path, tmp_path: Path) -> None:
    code = "\n".join(blocks(CLIENT, "python"))
    assert code.count(REDIS) == 2
    environment = {**os.environ, "MILLRACE_REDIS__URL": redis_url, "PYTHONPATH": str(ROOT)}

    with running_workers(redis_url, tiny_model, 1):
        done = subprocess.run(
            [sys.executable, "-c", f"{code.replace(REDIS, redis_url)}\n{SHOWN}"],
            capture_output=True,
            check=False,
            timeout=100,
            env=environment,
            cwd=tmp_path,
        )

    assert done.returncode == 0, done.stderr.decode()
    *printed, last = done.stdout.decode().splitlines()
    answers, counts, rest, stopped = json.loads(last)
    assert answers.keys() == {"france", "sum"}
    assert counts == {"total": 3, "completed": 2, "failed": 1, "cancelled": 0, "expired": 0}
    assert len(rest) == 2
    assert stopped in ("cancelling", "cancelled", "completed")
    assert "wrong invalid_value" in printed[0]
    assert "completed: 2 answered, 1 failed, " in printed[1]


def test_a_file_of_run_batch_runs_as_it_stands(
    tiny_model: Path, tmp_path: Path, read_results: Callable[[Path], tuple[dict[str, str], dict[str, str]]]
) -> None:
    commands, lines, *_ = blocks(FROM_VLLM, "")
    (tmp_path / "requests.jsonl").write_text(lines)
    shutil.copytree(tiny_model, tmp_path / MODEL)
    (command,) = (line for line in commands.splitlines() if line.startswith("millrace run"))
    names = {name: tmp_path / name for name in ("requests.jsonl", "results.jsonl", MODEL)}

    done = millrace(*(names.get(word, word) for word in shlex.split(command)[1:]), *ONE_THREAD)

    assert done.returncode == 0, done.stderr.decode()
    answers, errors = read_results(tmp_path / "results.jsonl")
    assert answers.keys() == {"a", "b"}
    assert errors == {}


def test_one_reader_reads_the_errors_of_both_programs(
    tmp_path: Path, read_results: Callable[[Path], tuple[dict[str, str], dict[str, str]]]
) -> None:
    path = tmp_path / "results.jsonl"
    path.write_text("\n".join(map(json.dumps, (*OF_VLLM, OURS, CANCELLED))))

    answers, errors = read_results(path)

    assert answers == {}
    assert errors == {
        "too long": "it is too long",
        "elsewhere": "URL /v1/nothing was used",
        "wrong": "n is 0",
        "late": "cancelled",
    }
