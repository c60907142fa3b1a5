"""Producers that use nothing of ours: celery-node submits, redis-py polls."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from contextlib import ExitStack
from pathlib import Path

import pytest

from tests.support.http_servers import bearer, chat_lines, new_key, serving
from tests.support.processes import wait_until
from tests.support.registry import TestRegistry, must_claim, ok
from tests.support.request_lines import chat_line, completion_line, essences, read_records
from tests.support.tiny_tokenizer import CHAT_TEMPLATE
from tests.support.workers import ONE_THREAD, WorkerProcesses, millrace, running_workers
from worker.registry.keys import UnitRef

HERE = Path(__file__).parent

SCRIPT = Path(__file__).with_name("poll_results.py")


@pytest.mark.interop
def test_a_node_producer_gets_the_records_of_an_offline_run(redis_url: str, tiny_model: Path, tmp_path: Path) -> None:
    requests, offline, results = (tmp_path / f"{name}.jsonl" for name in ("requests", "offline", "results"))
    lines = [completion_line(custom_id=f"c{number}", max_tokens=8, temperature=0) for number in range(600)]
    lines += [b'{"prompt": "\xc3\xa4 \xf0\x9f\x8c\x8a", "max_tokens": 4, "temperature": 0}']
    lines += [chat_line(max_tokens=4, temperature=0), b"{not json"]
    requests.write_bytes(b"\n".join(lines) + b"\n")
    done = millrace("run", "-i", requests, "-o", offline, "--model", tiny_model, *ONE_THREAD)
    assert done.returncode == 0, done.stderr.decode()

    with running_workers(redis_url, tiny_model, 1), results.open("wb") as output:
        command = ["node", str(HERE / "submit_and_poll.js"), redis_url, str(requests)]
        node = subprocess.run(command, stdout=output, stderr=subprocess.PIPE, check=False, timeout=90)

    assert node.returncode == 0, node.stderr.decode()
    assert node.stderr == b"done\n"
    records = read_records(results)
    assert len(records) == len(lines)
    assert essences(records) == essences(read_records(offline))


@pytest.mark.interop
def test_openais_client_for_node_goes_through_all_of_a_batch(redis_url: str, tmp_path: Path) -> None:
    requests = tmp_path / "requests.jsonl"
    requests.write_bytes(chat_lines("a", "b", "c"))
    key, workers = new_key(redis_url, "team-a"), WorkerProcesses(redis_url, tmp_path)
    with ExitStack() as stack, serving(redis_url) as server:
        stack.callback(workers.kill_all)
        workers.start(engine={"chat_template": CHAT_TEMPLATE}, model__name="fake", limits__models="later")
        wait_until(lambda: server.http.get("/v1/models", headers=bearer(key)).json()["data"], timeout_s=60)
        command = ["node", str(HERE / "openai_batches.mjs"), f"{server.url}/v1", key, str(requests), "later"]
        done = subprocess.run(command, capture_output=True, check=False, timeout=120)
    assert done.returncode == 0, done.stderr.decode()
    found = json.loads(done.stdout)
    assert found["file"] == found["sameFile"]
    assert found["sent"].encode() == requests.read_bytes()
    assert (found["done"]["status"], found["done"]["request_counts"]["completed"]) == ("completed", 3)
    answers = [json.loads(line) for line in found["output"].splitlines()]
    assert {answer["custom_id"] for answer in answers} == {"a", "b", "c"}
    assert all(answer["response"]["body"]["object"] == "chat.completion" for answer in answers)
    assert found["cancelled"]["status"] == "cancelled"
    assert found["batches"] == [found["cancelled"]["id"], found["done"]["id"]]  # two pages of one
    assert (found["files"], found["models"]) == ([found["file"]["id"]], ["fake"])
    assert (found["deleted"]["deleted"], found["isGone"], found["conflict"]) == (True, True, 409)


def test_records_come_while_the_job_runs_and_the_reader_ends_with_it(redis_url: str) -> None:
    registry = TestRegistry.at(redis_url)
    job_id = registry.running_job([0, 1, 2])
    leases = registry.leases()
    shard = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(shard, [ok(2, '{"i": 2}')])
    with subprocess.Popen([sys.executable, "-W", "error", SCRIPT, redis_url, job_id], stdout=subprocess.PIPE) as reader:
        assert reader.stdout is not None
        assert json.loads(reader.stdout.readline()) == {"i": 2}
        leases.put(shard, [ok(0, '{"i": 0}'), ok(1, '{"i": 1}')])
        assert [json.loads(line)["i"] for line in reader.stdout] == [0, 1]
        assert reader.wait(timeout=10) == 0
    registry.redis.close()


def test_nothing_of_ours_is_imported() -> None:
    assert not re.search(r"^\s*(import|from) (worker|engine|settings|kernels)", SCRIPT.read_text(), re.MULTILINE)
