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
from tests.support.workers import worker_processes
from worker.client import BatchClient

NUM_SHORT, NUM_LONG = 40, 20
HELD_AFTER = 20  # answers: fewer than there are short ones, so the job is then neither at its beginning nor at its end

SCRIPT = Path(__file__).resolve().parents[2] / "interop" / "use_page.mjs"

pytestmark = [
    pytest.mark.browser,
    pytest.mark.skipif(chromium_executable() is None, reason="no Chromium (Debian: chromium)"),
    pytest.mark.skipif(shutil.which("node") is None, reason="no node"),
]


def _write_lines(directory: Path) -> list[Path]:
    """Files of a job that is held, of one that runs to its end, and of one for a model that nobody serves."""
    names = [f"ticket-{number}" for number in range(NUM_SHORT)]
    # One of the lines asks for no token, so that there is a failure to show.
    short = chat_lines(*names, model="tiny") + chat_lines("bad", model="tiny").replace(b": 4}", b": 0}")
    long = chat_lines(*[f"long-{number}" for number in range(NUM_LONG)], model="tiny")
    long = long.replace(b": 4}", b': 500, "ignore_eos": true}')
    files = {"held": short + long, "lines": short, "waiting": chat_lines(*names, model="later")}
    paths = [directory / f"{name}.jsonl" for name in files]
    for path, data in zip(paths, files.values(), strict=True):
        path.write_bytes(data)
    return paths


@pytest.fixture
def seen(redis_url: str, tiny_model: Path, tmp_path: Path) -> dict[str, Any]:
    """What the script saw; its pictures are in $PAGE_PICTURES, if that is set."""
    pictures = os.environ.get("PAGE_PICTURES", str(tmp_path))
    paths = _write_lines(tmp_path)
    key, executable = new_key(redis_url, "team-a"), chromium_executable()
    assert executable is not None
    # Of few blocks, so that those in use are seen in their bar.
    settings = {"worker__shard_size": "100", "worker__lease_s": "60", "engine__kv_cache__num_blocks": "65"}
    with worker_processes(redis_url, tmp_path) as workers, serving(redis_url) as server:
        workers.start(
            engine={"held_after": HELD_AFTER},
            model__path=str(tiny_model),
            model__name="tiny",
            engine__num_threads="1",
            limits__models="later",
            **settings,
        )
        command = ["node", str(SCRIPT), server.url, key, *map(str, paths), executable, pictures]
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
        held = client.status(seen["held"])
        assert held.status.value == "cancelled"
        assert HELD_AFTER <= held.request_counts.completed < NUM_SHORT + NUM_LONG
        assert {job.tenant for job in client.jobs()} == {"team-a"}
    assert len(seen["during"]) == 6  # the list and the job; light, dark, phone
    for state, percent, rate in seen["during"].values():
        assert (state, 0 < percent < 100) == ("in progress", True)
        assert float(rate) > 0
    assert [0 < used < total for used, total in seen["kv"].values()] == [True] * 3
    assert seen["wasLive"]
    assert seen["note"] == ""  # no longer: the job has ended
    assert len(seen["output"].splitlines()) == 40
    assert seen["problems"] == []  # nothing that the page's own policy refuses, no error of its script
    assert (seen["cookies"], seen["readable"]) == ([["millrace_key", True, "Strict"]], "")
    assert [fault for fault in seen["faults"] if fault[1] in ("serious", "critical")] == []
    assert seen["wide"] == []  # nothing is wider than the screen
