"""Measures one large job through the queue: `python -m tests.benchmarks.large_job [--lines N] [--line-bytes N]`.

A strict job, so every line is checked before the first one runs. Producer, worker, reader and Redis are a process each.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from redis import Redis

from tests.benchmarks.large_job_part import forget_peak, peak_rss_mib, rss_mib
from tests.benchmarks.machine import QueueMachine
from tests.benchmarks.queue import ROOT, queue_lines, queue_workers
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port, private_redis
from tests.support.tiny_tokenizer import make_tokenizer
from worker.client import BatchClient
from worker.records.record import has_failed
from worker.schemas import JobState, JobStatus

Memory = tuple[float, float]  # MiB of resident memory: before the job, and at most

WORDS = (" the", " and", " you", " are", " a", " is", " system", " user")
TEXT_BYTES = 1 << 20  # one text, of which each line has another piece
SYSTEM = "You are an assistant and you answer the user in one line."

START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 600.0
WARM_UP_LINES = 500
POLL_S = 0.02


@dataclass(frozen=True)
class LargeJobFigures:
    """The figures of one run. Times are wall-clock seconds."""

    num_lines: int
    input_bytes: int
    output_bytes: int
    accepted_s: float  # from the first line read to the job's acceptance
    planned_s: float  # from there to the job's shards
    run_s: float  # from there to the last record, by an engine that answers at once
    downloaded_s: float
    producer_mib: Memory
    planner_mib: Memory  # of the worker, until its plan was done
    worker_mib: Memory  # the same until the job was done
    reader_mib: Memory
    redis_peak_mib: float  # lines and records

    def as_table(self) -> str:
        """A Markdown table, a row for each phase."""
        rows = [
            ("accepted", self.accepted_s, self.input_bytes, "producer", self.producer_mib),
            ("planned", self.planned_s, self.input_bytes, "worker", self.planner_mib),
            ("run", self.run_s, self.input_bytes, "worker", self.worker_mib),
            ("downloaded", self.downloaded_s, self.output_bytes, "reader", self.reader_mib),
        ]
        lines = ["| what | s | lines/s | MB/s | RSS before -> peak |", "|---|---:|---:|---:|---|"]
        for what, seconds, num_bytes, who, (before, peak) in rows:
            rates = f"{self.num_lines / seconds:,.0f} | {num_bytes / seconds / 1e6:.1f}"
            lines.append(f"| {what} | {seconds:.2f} | {rates} | {who} {before:.0f} -> {peak:.0f} MiB |")
        sizes = f"{self.input_bytes / 1e6:.0f} MB in, {self.output_bytes / 1e6:.0f} MB out"
        return "\n".join([f"{self.num_lines:,} lines, {sizes}; Redis at most {self.redis_peak_mib:.0f} MiB", *lines])


def large_lines(num_lines: int, line_bytes: int) -> Iterator[bytes]:
    """Chat lines of about `line_bytes` bytes, no two the same; the tests' tokenizer makes a token of three bytes."""
    random_ = random.Random(0)
    text = "".join(random_.choices(WORDS, k=TEXT_BYTES // 3))
    for number in range(num_lines):
        begin = random_.randrange(TEXT_BYTES // 2)
        question = f"Question {number}:" + text[begin : begin + max(line_bytes - 260, 0)]
        messages = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": question}]
        body = {"model": "millrace", "messages": messages, "max_tokens": 16, "temperature": 0.7}
        line = {"custom_id": f"large-{number}", "method": "POST", "url": "/v1/chat/completions", "body": body}
        yield json.dumps(line).encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table; 0. Takes two to three minutes with the defaults."""
    options = parse(arguments)
    print(QueueMachine.read(), flush=True)
    with tempfile.TemporaryDirectory() as name:
        print(measure(Path(name), options.lines, options.line_bytes).as_table())
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.large_job", description=__doc__)
    parser.add_argument("--lines", type=int, default=50_000, metavar="N", help="lines of the job")
    parser.add_argument("--line-bytes", type=int, default=4_000, metavar="N", help="bytes of a line, about")
    options = parser.parse_args(arguments)
    if not 1 <= options.lines <= 50_000:
        parser.error("--lines: 1 to 50000, which is limits.max_prompts_per_job")
    if not 300 <= options.line_bytes <= 10_000:
        parser.error("--line-bytes: 300 to 10000, what the tests' tokenizer makes 4096 tokens of")
    return options


def measure(directory: Path, num_lines: int, line_bytes: int) -> LargeJobFigures:
    """Run the job in `directory`, and check that every line has its answer."""
    source, target = directory / "lines.jsonl", directory / "results.jsonl"
    with source.open("wb") as file:
        file.writelines(line + b"\n" for line in large_lines(num_lines, line_bytes))
    make_tokenizer(directory / "model")
    with private_redis(directory, port=free_port()) as url, BatchClient(url) as client, Redis.from_url(url) as redis:
        with queue_workers(url, directory, 1) as (pid,):
            wait_until(client.workers, timeout_s=START_TIMEOUT_S)
            client.wait(client.submit(queue_lines(WARM_UP_LINES)), RUN_TIMEOUT_S)
            forget_peak(pid)
            worker_before_mib = rss_mib(pid)
            submitted = _part("submit", url, str(source))
            job_id = submitted["job_id"]
            _wait_planned(client, job_id)
            planner_peak_mib = peak_rss_mib(pid)
            job = client.wait(job_id, RUN_TIMEOUT_S)
            worker_peak_mib = peak_rss_mib(pid)
        read = _part("read", url, job_id, str(target))
        redis_peak_mib = int(redis.info("memory")["used_memory_peak"]) / 2**20
    _check(job, target, num_lines)
    return LargeJobFigures(
        num_lines=num_lines,
        input_bytes=source.stat().st_size,
        output_bytes=target.stat().st_size,
        accepted_s=submitted["wall_s"],
        planned_s=(job.in_progress_at or 0.0) - job.created_at,
        run_s=(job.finished_at or 0.0) - (job.in_progress_at or 0.0),
        downloaded_s=read["wall_s"],
        producer_mib=(submitted["before_mib"], submitted["peak_mib"]),
        planner_mib=(worker_before_mib, planner_peak_mib),
        worker_mib=(worker_before_mib, worker_peak_mib),
        reader_mib=(read["before_mib"], read["peak_mib"]),
        redis_peak_mib=redis_peak_mib,
    )


def _part(*arguments: str) -> dict[str, Any]:
    command = [sys.executable, "-m", "tests.benchmarks.large_job_part", *arguments]
    done = subprocess.run(command, cwd=ROOT, stdout=subprocess.PIPE, check=True, timeout=RUN_TIMEOUT_S)
    figures: dict[str, Any] = json.loads(done.stdout)
    return figures


def _wait_planned(client: BatchClient, job_id: str) -> None:
    """Return within 20 ms of the end of the plan: the worker's memory is looked at then."""
    while client.status(job_id).status is JobState.VALIDATING:
        time.sleep(POLL_S)


def _check(job: JobStatus, results: Path, num_lines: int) -> None:
    """A run that lost a line, or failed one, has measured something else."""
    with results.open("rb") as file:
        custom_ids = {record["custom_id"] for record in map(json.loads, file) if not has_failed(record)}
    if len(custom_ids) != num_lines or job.request_counts.completed != num_lines:
        raise AssertionError(f"{len(custom_ids)} answers of {num_lines} lines; {job}")


if __name__ == "__main__":
    sys.exit(main())
