"""Our engine behind Redis and a worker: `millrace submit --wait` for each trial."""

from __future__ import annotations

import json
import os
import subprocess
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from tests.benchmarks.peers.servers.trial_loop import TrialAnswer
from tests.support.free_port import free_port
from tests.support.millrace import COMMAND
from tests.support.redis_server import private_redis
from tests.support.workers import running_workers
from worker.client import BatchClient


class QueueSide:
    """One worker, one job at a time."""

    def __init__(self, redis_url: str, directory: Path) -> None:
        self._redis_url = redis_url
        self._directory = directory
        self.command_s: list[float] = []  # of each trial: the whole command, its own start-up included

    def run(self, prompts: Sequence[Sequence[int]], max_tokens: int) -> TrialAnswer:
        """Seconds from the job's acceptance to its last record. Raises CalledProcessError where the job failed."""
        lines, results = self._directory / "lines.jsonl", self._directory / "results.jsonl"
        lines.write_text("".join(_line(number, prompt, max_tokens) for number, prompt in enumerate(prompts)))
        start = time.perf_counter()
        done = subprocess.run(
            [*COMMAND, "submit", str(lines), "--wait", "-o", str(results), "--redis-url", self._redis_url],
            check=True,
            capture_output=True,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        self.command_s.append(time.perf_counter() - start)
        with BatchClient(self._redis_url) as client:
            job = client.status(done.stdout.split()[0])
        assert job.finished_at is not None
        return TrialAnswer(seconds=job.finished_at - job.created_at, outputs=_outputs(results, len(prompts)))


def _line(number: int, prompt: Sequence[int], max_tokens: int) -> str:
    body = {
        "prompt": list(prompt),
        "max_tokens": max_tokens,
        "temperature": 0,
        "ignore_eos": True,
        "return_token_ids": True,
    }
    return json.dumps({"custom_id": str(number), "method": "POST", "url": "/v1/completions", "body": body}) + "\n"


def _outputs(results: Path, count: int) -> list[list[int]]:
    """In the order of the prompts."""
    records = {record["custom_id"]: record for record in map(json.loads, results.read_text().splitlines())}
    return [records[str(number)]["response"]["body"]["choices"][0]["token_ids"] for number in range(count)]


@contextmanager
def queue_side(model: Path, assignments: Sequence[str]) -> Iterator[QueueSide]:
    """A private Redis and one worker with these settings."""
    options = [part for assignment in assignments for part in ("--set", assignment)]
    with ExitStack() as stack:
        directory = Path(stack.enter_context(tempfile.TemporaryDirectory()))
        url = stack.enter_context(private_redis(directory, port=free_port()))
        stack.enter_context(running_workers(url, model, 1, *options))
        yield QueueSide(url, directory)
