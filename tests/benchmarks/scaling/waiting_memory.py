"""Resident memory of a process while many requests wait for it."""

from __future__ import annotations

import json
import random
import subprocess
import tempfile
import time
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from tests.support.free_port import free_port
from tests.support.millrace import COMMAND
from tests.support.redis_server import private_redis
from tests.support.wait_until import wait_until
from tests.support.workers import running_workers
from worker.client import BatchClient

PROMPT_TOKENS, MAX_TOKENS = 128, 64  # 64 at a time take a second: most of a thousand still wait when looked at
OPTIONS = ("--set", "engine.num_threads=1", "--set", "engine.kv_cache.num_blocks=1000")  # 64 requests need 768
START_TIMEOUT_S = 60.0
SETTLE_S = 4.0  # after the first results, or the job's start


@dataclass(frozen=True)
class WaitingMemory:
    """Of one process."""

    process: str  # "millrace run" or "worker"
    num_waiting: int  # of the file or job, those that run included
    resident_bytes: int
    peak_bytes: int  # the most since it began


def of_run(model: Path, num_requests: int) -> WaitingMemory:
    """`millrace run` on a file of that many lines."""
    with tempfile.TemporaryDirectory() as name:
        lines, results = _write_lines(Path(name), num_requests), Path(name) / "results.jsonl"
        command = [*COMMAND, "run", "-i", str(lines), "-o", str(results), "--model", str(model), *OPTIONS]
        process = subprocess.Popen(command, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            wait_until(lambda: _has_begun(results), timeout_s=START_TIMEOUT_S)
            time.sleep(SETTLE_S)
            return _read("millrace run", num_requests, process.pid)
        finally:
            process.kill()
            process.wait()


def of_worker(model: Path, num_requests: int) -> WaitingMemory:
    """A worker with one job of that many lines."""
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(private_redis(directory, port=free_port()))
        (worker,) = stack.enter_context(running_workers(url, model, 1, *OPTIONS))
        client = stack.enter_context(BatchClient(url))
        with _write_lines(directory, num_requests).open("rb") as lines:
            job_id = client.submit(lines)
        wait_until(lambda: client.status(job_id).request_counts.finished > 0, timeout_s=START_TIMEOUT_S)
        time.sleep(SETTLE_S)
        memory = _read("worker", num_requests, worker.pid)
        client.cancel(job_id)
        return memory


def _has_begun(results: Path) -> bool:
    return results.exists() and results.stat().st_size > 0


def _write_lines(directory: Path, count: int) -> Path:
    path, generator = directory / "lines.jsonl", random.Random(count)
    with path.open("w") as file:
        for _ in range(count):
            prompt = [generator.randrange(256) for _ in range(PROMPT_TOKENS)]
            body = {"prompt": prompt, "max_tokens": MAX_TOKENS, "temperature": 0, "ignore_eos": True}
            file.write(json.dumps(body) + "\n")
    return path


def _read(process: str, num_waiting: int, pid: int) -> WaitingMemory:
    fields = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    resident, peak = (int(fields[name].split()[0]) * 1024 for name in ("VmRSS", "VmHWM"))
    return WaitingMemory(process, num_waiting, resident, peak)
