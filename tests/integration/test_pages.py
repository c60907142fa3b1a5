"""The code on the pages for users does what they say, but for the address of Redis."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

from tests.pages.document_check import Markdown
from tests.support.workers import ROOT, running_workers

CLIENT = ROOT / "worker" / "CLIENT.md"

REDIS = "redis://127.0.0.1:6379/0"

SHOWN = "import json as _json; print(_json.dumps([answers, counts.model_dump(), rest, stopped.status]))"


def blocks(page: Path, language: str) -> list[str]:
    """The fenced blocks of a language, in their order."""
    return [piece.text for name, piece in Markdown(page.read_text()).fenced if name == language]


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
    assert counts == {"total": 3, "completed": 2, "failed": 1}
    assert len(rest) == 2
    assert stopped in ("cancelled", "completed")
    assert "wrong invalid_value" in printed[0]
    assert "completed: 2 answered, 1 failed, " in printed[1]
