"""Jobs by `millrace run` and through Redis: a file with bad lines, several jobs at once, one that is cancelled."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.support.processes import wait_until
from tests.support.request_lines import check_thousand_records, error_body, essences, read_records, thousand_lines
from tests.support.workers import ONE_THREAD, QUICK_HEARTBEATS, millrace, python_block, replace_line, running_workers
from worker.client import BatchClient

MILLRACE = Path(sys.executable).parent / "millrace"  # the installed command
FEWER = 250  # lines, with a bad one of five kinds among them


@pytest.fixture(scope="module")
def requests_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("requests") / "requests.jsonl"
    path.write_text("\n".join(thousand_lines()) + "\n")
    return path


@pytest.fixture(scope="module")
def offline_records(requests_file: Path, tiny_model: Path) -> list[dict[str, Any]]:
    """The installed command's records of the file, and its summary."""
    output = requests_file.with_name("offline.jsonl")
    command = [str(MILLRACE), "run", "-i", str(requests_file), "-o", str(output), "--model", str(tiny_model)]
    summary = str(requests_file.with_name("summary.json"))
    done = subprocess.run([*command, "--summary", summary, *ONE_THREAD], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr.decode()
    return read_records(output)


@pytest.fixture(scope="module")
def offline(offline_records: list[dict[str, Any]]) -> list[tuple[Any, ...]]:
    return essences(offline_records)


def test_a_thousand_lines_with_twenty_bad_ones_give_a_thousand_records(
    requests_file: Path, offline_records: list[dict[str, Any]]
) -> None:
    check_thousand_records(offline_records)
    figures = json.loads(requests_file.with_name("summary.json").read_text())
    assert (figures["requests"], figures["failed"]) == (1000, 20)
    assert figures["output_tokens"] > 0
    assert 0 < figures["cached_tokens"] < figures["prompt_tokens"]
    assert figures["elapsed_s"] > 0
    assert figures["load_s"] > 0


def test_submit_and_wait_gives_the_records_of_an_offline_run(
    redis_url: str, requests_file: Path, tiny_model: Path, tmp_path: Path, offline: list[tuple[Any, ...]]
) -> None:
    output = tmp_path / "results.jsonl"
    with running_workers(redis_url, tiny_model, 1):
        done = millrace("submit", requests_file, "--wait", "-o", output, "--redis-url", redis_url)
    assert done.returncode == 0, done.stderr.decode()
    records = read_records(output)
    check_thousand_records(records)
    assert essences(records) == offline


def test_two_workers_share_one_job_and_give_the_same_records(
    redis_url: str, requests_file: Path, tiny_model: Path, offline: list[tuple[Any, ...]]
) -> None:
    # Shards of 40, two at a time in each worker: neither can take the whole job before the other sees it.
    options = ("--set", "worker.shard_size=40", "--concurrency", "2", "--set", "engine.max_num_seqs=4")
    with running_workers(redis_url, tiny_model, 2, *options, *QUICK_HEARTBEATS), BatchClient(redis_url) as client:
        before = {worker.id: worker.steps for worker in client.workers()}
        job_id = client.submit(requests_file.read_bytes().splitlines())
        status = client.wait(job_id, timeout_s=60.0)
        records = list(client.results(job_id))
        # The next heartbeats say that both workers ran steps for this job.
        wait_until(lambda: all(worker.steps > before[worker.id] for worker in client.workers()), timeout_s=30.0)
    check_thousand_records(records)
    assert essences(records) == offline
    assert (status.request_counts.completed, status.request_counts.failed) == (980, 20)
    assert status.shards_total == status.shards_done == 25


def test_the_readmes_plain_celery_producer_gets_them_too(
    redis_url: str, requests_file: Path, tiny_model: Path, offline_records: list[dict[str, Any]]
) -> None:
    """The README's own code, with another Redis and other lines. Nothing of ours is imported to produce or to poll."""
    code = python_block(after="From a plain Celery producer")
    code = replace_line(code, "url = ", f"url = {redis_url!r}")
    code = replace_line(code, "lines = ", f"lines = open({str(requests_file)!r}).read().splitlines()[:{FEWER}]")
    shown = "import json as _json; print(); print(_json.dumps([job_id, state, records]))"
    with running_workers(redis_url, tiny_model, 1):
        done = subprocess.run(
            [sys.executable, "-W", "error", "-c", f"{code}\n{shown}"], capture_output=True, check=False, timeout=100
        )
    assert done.returncode == 0, done.stderr.decode()
    assert not re.search(r"^(import|from) (worker|engine|settings|kernels)", code, re.MULTILINE)
    job_id, state, records = json.loads(done.stdout.splitlines()[-1])
    assert state == "done"
    assert len(records) == FEWER
    assert essences(records) == essences(record for record in offline_records if _line_number(record) <= FEWER)
    with BatchClient(redis_url) as client:
        assert client.status(job_id).request_counts.total == FEWER


def _line_number(record: dict[str, Any]) -> int:
    """The number of a bad line, from 1."""
    failure = error_body(record)
    return int(record["custom_id"].removeprefix("line-")) + 1 if failure is None else int(failure["line"])


def test_equal_prompts_of_several_jobs_and_tenants_have_a_record_each(redis_url: str, tiny_model: Path) -> None:
    lines = [{"prompt": f"the same question {n % 5}", "max_tokens": 8, "temperature": 0} for n in range(20)]
    with BatchClient(redis_url) as client:
        # Submitted before there is a worker, which then has all of them at once.
        job_ids = [client.submit(lines, tenant=tenant) for tenant in ("one", "one", "other")]
        with running_workers(redis_url, tiny_model, 1):
            jobs = [client.wait(job_id, timeout_s=60.0) for job_id in job_ids]
        found = [
            {record["custom_id"]: record["response"]["body"]["choices"][0]["text"] for record in client.results(job_id)}
            for job_id in job_ids
        ]
    assert [job.request_counts.completed for job in jobs] == [20, 20, 20]
    assert found[0] == found[1] == found[2]
    assert len(found[0]) == 20
    assert {found[0][f"line-{n}"] for n in (1, 6, 11, 16)} == {found[0]["line-1"]}


def test_cancel_keeps_what_is_finished_and_gives_the_rest_a_record_each(redis_url: str, tiny_model: Path) -> None:
    short = [{"prompt": f"short {i}", "max_tokens": 2, "temperature": 0} for i in range(8)]
    long = [{"prompt": f"long {i}", "max_tokens": 900, "temperature": 0, "ignore_eos": True} for i in range(40)]
    with running_workers(redis_url, tiny_model, 1, *QUICK_HEARTBEATS) as (worker,), BatchClient(redis_url) as client:
        job_id = client.submit([*short, *long])
        wait_until(lambda: client.status(job_id).request_counts.completed >= len(short), timeout_s=30.0)
        client.cancel(job_id)
        status = client.wait(job_id, timeout_s=60.0)
        wait_until(lambda: all(w.open_requests == 0 for w in client.workers()))
        records = list(client.results(job_id))
        again = client.submit([{"prompt": "after", "max_tokens": 2}])
        assert client.wait(again, timeout_s=30.0).request_counts.completed == 1
        assert worker.poll() is None
    assert status.status == "cancelled"
    assert len(records) == len(short) + len(long)
    codes = [record["error"]["code"] for record in records if record["error"] is not None]
    finished = [record for record in records if record["error"] is None]
    assert len(finished) == status.request_counts.completed >= len(short)
    assert set(codes) == {"batch_cancelled"}
