"""No log at level info holds what users wrote; that is in Redis and in their results only."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.fake_engine import QUOTE
from tests.support.monitoring import running_collector
from tests.support.workers import FAKE_WORKER_STOP_TIMEOUT_S, ONE_THREAD, millrace, running_workers, worker_processes
from worker.client import BatchClient

CANARY = "canary-sings-7c1e"


def lines() -> list[str]:
    """Good lines, and bad ones of many kinds, each with the word in it."""
    chat = {"role": "user", "content": f"{CANARY} in a chat"}
    bodies: list[Any] = [
        {"prompt": f"{CANARY} in a prompt", "max_tokens": 2},
        {"messages": [chat], "max_tokens": 2, "metadata": {"note": CANARY}},
        {"messages": [{"role": CANARY, "content": "role"}]},
        {"messages": [chat], "model": f"model-{CANARY}"},
        {"prompt": f"{CANARY} {'long ' * 5000}"},
        {"prompt": CANARY, "temperature": CANARY},
        {"prompt": CANARY, "max_tokens": -1},
        {"prompt": CANARY, CANARY: 1},
        {"prompt": f"{CANARY} \ud800"},
        {"prompt": {"text": CANARY}},
        {"messages": [chat], "tools": [{"type": "function", "function": {"name": CANARY}}]},
        {"messages": [chat], "chat_template_kwargs": {CANARY: CANARY}},
        {"prompt": CANARY, "stop": [CANARY] * 100},
        [CANARY],
        CANARY,
    ]
    whole = {"custom_id": CANARY, "method": CANARY, "url": f"/{CANARY}", "body": {"prompt": CANARY}}
    broken = [
        f'{{"prompt": "{CANARY}',
        f"{CANARY} is no JSON",
        "[" * 500 + CANARY,
        f'{{"prompt": NaN, "x": "{CANARY}"}}',
    ]
    return [json.dumps(line) for line in (*bodies, whole, whole)] + broken


def test_no_log_of_worker_or_producer_holds_a_word_of_a_prompt(
    redis_url: str, tiny_model: Path, tmp_path: Path
) -> None:
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_text("\n".join(lines()))
    options = ["--redis-url", redis_url, "--set", "log.level=info"]
    with running_collector() as collector:
        traced = ("tracing.enabled=on", f"tracing.endpoint={collector.url}")
        options += [word for assignment in traced for word in ("--set", assignment)]
        with running_workers(redis_url, tiny_model, 1, *options[2:]):
            submitted = millrace("submit", requests, "--wait", "-o", results, *options)
            job_id = submitted.stdout.decode().strip()
            watched = millrace("watch", job_id, *options)
            listed = millrace("jobs", *options)
    log = (tiny_model.parent / "worker-0.log").read_text()

    records = [json.loads(record) for record in results.read_bytes().splitlines()]
    failed = [record for record in records if record["error"] or record["response"]["status_code"] != 200]
    assert len(records) == len(lines())
    assert len(failed) >= 15  # else this test would prove little
    assert "is up" in log  # it does log at info
    assert CANARY not in log
    for done in (submitted, watched, listed):
        assert CANARY.encode() not in done.stderr
    assert CANARY.encode() not in listed.stdout + watched.stdout
    assert {span.name for span in collector.spans} == {"submit", "plan", "claim", "prefill", "decode", "record"}
    assert not any(CANARY.encode() in raw for raw in collector.raw)


@pytest.mark.parametrize("log_format", ["json", "console"])
def test_no_traceback_of_a_worker_holds_a_word_of_the_prompt_it_broke_over(
    redis_url: str, tmp_path: Path, log_format: str
) -> None:
    with worker_processes(redis_url, tmp_path) as workers, BatchClient(redis_url) as client:
        worker = workers.start(log__format=log_format)
        workers.wait_up(client)
        client.submit([{"prompt": f"{QUOTE} {CANARY}", "metadata": {"note": CANARY}}])
        assert worker.wait(FAKE_WORKER_STOP_TIMEOUT_S) == 70

        assert "the engine broke" in workers.log()
        assert "ValueError" in workers.log()
        assert "fake_engine.py:" in workers.log()  # the traceback's frames
        assert CANARY not in workers.log()


def test_neither_does_an_offline_run(tiny_model: Path, tmp_path: Path) -> None:
    requests, results = tmp_path / "requests.jsonl", tmp_path / "results.jsonl"
    requests.write_text("\n".join(lines()))

    done = millrace("run", "-i", requests, "-o", results, "--model", tiny_model, *ONE_THREAD)

    assert done.returncode == 0, done.stderr.decode()
    assert CANARY.encode() in results.read_bytes()
    assert CANARY.encode() not in done.stderr + done.stdout
