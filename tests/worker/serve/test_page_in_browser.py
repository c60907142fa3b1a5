"""The page in Chromium while a worker runs: used as a person uses it, looked at, and searched for faults by axe."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from tests.support.http_servers import chat_lines, new_key, serving
from tests.support.monitoring import chromium_executable
from tests.support.workers import running_workers
from worker.client import BatchClient

SCRIPT = Path(__file__).resolve().parents[2] / "interop" / "use_page.mjs"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium_executable() is None, reason="no Chromium (Debian: chromium)"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no node"),
]


@pytest.fixture
def seen(redis_url: str, tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """What the script saw; its pictures are in $PAGE_PICTURES, if that is set."""
    pictures = Path(os.environ.get("PAGE_PICTURES", tmp_path))
    names = [f"ticket-{number}" for number in range(40)]
    lines, waiting = tmp_path / "lines.jsonl", tmp_path / "waiting.jsonl"
    # One of the lines asks for no token, so that there is a failure to show.
    lines.write_bytes(chat_lines(*names, model="tiny") + chat_lines("bad", model="tiny").replace(b": 4}", b": 0}"))
    waiting.write_bytes(chat_lines(*names, model="later"))
    key, executable = new_key(redis_url, "team-a"), chromium_executable()
    assert executable is not None
    with running_workers(redis_url, tiny_model, 1, "--set", "limits.models=later"), serving(redis_url) as server:
        command = ["node", str(SCRIPT), server.url, key, str(lines), str(waiting), executable, str(pictures)]
        done = subprocess.run(command, capture_output=True, check=False, timeout=400)
    assert done.returncode == 0, done.stderr.decode()
    found: dict[str, Any] = json.loads(done.stdout)
    return found


def test_a_job_is_submitted_cancelled_and_retried_by_the_page(seen: dict[str, Any], redis_url: str) -> None:
    with BatchClient(redis_url) as client:
        states = [client.status(seen[name]).status.value for name in ("cancelled", "ran", "retried")]
        assert states[:2] == ["cancelled", "completed"]
        assert states[2] in ("validating", "in_progress")  # for the same model, which nobody serves
        assert client.status(seen["ran"]).failures == {"invalid_value": 1}
        assert client.status(seen["retried"]).request_counts.total == 40
        assert {job.tenant for job in client.jobs()} == {"team-a"}
    assert seen["wasLive"]
    assert seen["note"] == ""  # no longer: the job has ended
    assert len(seen["output"].splitlines()) == 40
    assert seen["problems"] == []  # nothing that the page's own policy refuses, no error of its script
    assert (seen["cookies"], seen["readable"]) == ([["millrace_key", True, "Strict"]], "")
    assert [fault for fault in seen["faults"] if fault[1] in ("serious", "critical")] == []
    assert seen["wide"] == []  # nothing is wider than the screen
