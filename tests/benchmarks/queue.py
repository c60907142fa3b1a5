"""Measures what the queue costs without a model.

`python -m tests.benchmarks.queue [--prompts N] [--workers 1 2 4] [--repeats N] [--json FILE]`

A private Redis, real worker processes whose engine answers at once, jobs through the client.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from tests.benchmarks.machine import QueueMachine, cpu_time_s
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port, private_redis
from tests.support.tiny_tokenizer import make_tokenizer
from worker.client import BatchClient
from worker.records.record import has_failed

HEADER = (
    "workers",
    "prompts/s per worker",
    "all workers",
    "planning s",
    "after planning, per worker",
    "worker us",
    "Redis us",
    "submit us",
    "submit, Redis us",
    "results us",
)
EXPLANATION = """\
prompts/s: from the jobs' acceptance to the last record, planning included; median of the runs, spread in brackets
us: CPU microseconds a prompt, user and system: of the worker processes (planning included), of Redis while they ran,
of the producer and of Redis while lines were staged, of reading every record back
The engine answers at once: its checks, scheduling, model, sampling and detokenising are skipped; tokenising is not."""

WARM_UP_PROMPTS = 1000  # a worker: imports, connections, caches
START_TIMEOUT_S = 60.0
RUN_TIMEOUT_S = 120.0

ROOT = Path(__file__).resolve().parents[2]
STOP_TIMEOUT_S = 30.0

SYSTEM_PROMPTS = tuple(f"You are assistant number {i} and you answer the user in one line. " * 2 for i in range(5))


def as_table(measurements: Sequence[QueueMeasurement]) -> str:
    """A Markdown table, a row for each number of workers."""
    counts = sorted({m.num_workers for m in measurements})
    rows = [_row([m for m in measurements if m.num_workers == count]) for count in counts]
    lines = ["| " + " | ".join(row) + " |" for row in (HEADER, ("---:",) * len(HEADER), *rows)]
    return "\n".join([*lines, "", EXPLANATION])


def as_json(machine: QueueMachine, measurements: Sequence[QueueMeasurement]) -> dict[str, object]:
    """The machine and every run as plain data."""
    return {"machine": asdict(machine), "measurements": [_record(m) for m in measurements]}


def _row(runs: Sequence[QueueMeasurement]) -> tuple[str, ...]:
    rates = sorted(run.prompts_per_s_per_worker for run in runs)
    spread = f" ({rates[0]:.0f} - {rates[-1]:.0f})" if len(rates) > 1 else ""

    def us(field: str) -> str:
        return f"{median(run.us_per_prompt(getattr(run, field)) for run in runs):.0f}"

    return (
        str(runs[0].num_workers),
        f"{median(rates):.0f}{spread}",
        f"{median(rates) * runs[0].num_workers:.0f}",
        f"{median(run.planning_s for run in runs):.2f}",
        f"{median(run.shards_per_s_per_worker for run in runs):.0f}",
        us("worker_cpu_s"),
        us("redis_cpu_s"),
        us("submit_cpu_s"),
        us("submit_redis_cpu_s"),
        us("results_cpu_s"),
    )


def _record(m: QueueMeasurement) -> dict[str, object]:
    return {
        **asdict(m),
        "prompts_per_s_per_worker": m.prompts_per_s_per_worker,
        "shards_per_s_per_worker": m.shards_per_s_per_worker,
    }


@dataclass(frozen=True)
class QueueMeasurement:
    """One run: `num_jobs` jobs, one a worker, accepted at the same moment. CPU times are of all threads, in seconds."""

    num_workers: int
    num_prompts: int  # of all jobs together
    planning_s: float  # from acceptance until the last job was planned
    total_s: float  # from acceptance to the last record, planning included
    worker_cpu_s: float  # all workers, planning included
    redis_cpu_s: float  # while the workers ran
    submit_cpu_s: float  # the producer's
    submit_redis_cpu_s: float
    results_cpu_s: float  # of reading all results back

    @property
    def prompts_per_s_per_worker(self) -> float:
        """Prompts a second and worker, planning included."""
        return self.num_prompts / self.total_s / self.num_workers

    @property
    def shards_per_s_per_worker(self) -> float:
        """Prompts a second and worker once planning is done."""
        return self.num_prompts / (self.total_s - self.planning_s) / self.num_workers

    def us_per_prompt(self, seconds: float) -> float:
        """`seconds` in microseconds a prompt."""
        return seconds / self.num_prompts * 1e6


def run_queue(num_workers: int, num_prompts: int) -> QueueMeasurement:
    """Measure one job for each worker, `num_prompts` prompts in all."""
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory / "model")
        with private_redis(directory, port=free_port()) as url, BatchClient(url) as client:
            with Redis.from_url(url) as redis:
                redis_pid = int(redis.info("server")["process_id"])
            with queue_workers(url, directory, num_workers) as pids:
                wait_until(lambda: len(client.workers()) == num_workers, timeout_s=START_TIMEOUT_S)
                for job_id in _submit_together(client, [WARM_UP_PROMPTS] * num_workers, lambda: None):
                    client.wait(job_id, RUN_TIMEOUT_S)
                return _measure(client, pids, redis_pid, num_prompts)


def _measure(client: BatchClient, worker_pids: Sequence[int], redis_pid: int, num_prompts: int) -> QueueMeasurement:
    staged: list[tuple[float, float]] = []
    workers_s, redis_s, own_s = cpu_time_s(worker_pids), cpu_time_s([redis_pid]), time.process_time()
    sizes = _parts(num_prompts, len(worker_pids))
    job_ids = _submit_together(client, sizes, lambda: staged.append((cpu_time_s([redis_pid]), time.process_time())))
    jobs = [client.wait(job_id, RUN_TIMEOUT_S) for job_id in job_ids]
    worker_cpu_s, redis_end_s = cpu_time_s(worker_pids) - workers_s, cpu_time_s([redis_pid])
    reading_s = time.process_time()
    _check_records(client, job_ids, num_prompts)
    began = min(job.created_at for job in jobs)
    return QueueMeasurement(
        num_workers=len(worker_pids),
        num_prompts=num_prompts,
        planning_s=max(job.in_progress_at or began for job in jobs) - began,
        total_s=max(job.finished_at or began for job in jobs) - began,
        worker_cpu_s=worker_cpu_s,
        redis_cpu_s=redis_end_s - staged[0][0],
        submit_cpu_s=staged[0][1] - own_s,
        submit_redis_cpu_s=staged[0][0] - redis_s,
        results_cpu_s=time.process_time() - reading_s,
    )


def _submit_together(client: BatchClient, sizes: Sequence[int], on_staged: Callable[[], None]) -> list[str]:
    """Submit a job of each size; none is accepted before the lines of all are on their way, when `on_staged` runs."""
    barrier = threading.Barrier(len(sizes), action=on_staged)

    def lines(num_lines: int) -> Iterator[bytes]:
        yield from queue_lines(num_lines)
        barrier.wait(RUN_TIMEOUT_S)

    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(lambda size: client.submit(lines(size)), sizes))


def _check_records(client: BatchClient, job_ids: Sequence[str], num_prompts: int) -> None:
    """Read every record: a run that lost a prompt, or failed one, has measured something else."""
    records = [record for job_id in job_ids for record in client.results(job_id)]
    num_good = sum(not has_failed(record) for record in records)
    if num_good != num_prompts or len(records) != num_prompts:
        raise AssertionError(f"{len(records)} records, {num_good} of them good, of {num_prompts} prompts")


def _parts(total: int, count: int) -> list[int]:
    return [total // count + (position < total % count) for position in range(count)]


@contextmanager
def queue_workers(redis_url: str, directory: Path, count: int) -> Iterator[list[int]]:
    """Start workers with the tokenizer in `directory`/model and stop them at the end; their process ids."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.queue_worker",
        str(directory / "model"),
        f"redis.url={redis_url}",
    ]
    processes: list[subprocess.Popen[bytes]] = []
    try:
        for number in range(count):
            with (directory / f"worker-{number}.log").open("wb") as log:
                processes.append(subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=subprocess.STDOUT))
        yield [process.pid for process in processes]
        for process in processes:
            process.terminate()
        codes = [process.wait(STOP_TIMEOUT_S) for process in processes]
        if any(codes):
            raise AssertionError(f"workers ended with {codes}")
    finally:
        for process in processes:
            if process.poll() is None:
                process.kill()
                process.wait(STOP_TIMEOUT_S)


def queue_lines(num_lines: int) -> Iterator[bytes]:
    """Batch lines of about 360 bytes: conversations and completions in turn, five system prompts."""
    for number in range(num_lines):
        system, question = SYSTEM_PROMPTS[number % 5], f"Question {number}: is {number * 7919 % 10007} a prime?"
        body: dict[str, Any] = {"max_tokens": 16, "temperature": 0.7, "seed": number}
        if number % 2:
            url, body["prompt"] = "/v1/completions", f"{system}{question}"
        else:
            url = "/v1/chat/completions"
            body["messages"] = [{"role": "system", "content": system}, {"role": "user", "content": question}]
        yield json.dumps({"custom_id": f"q-{number}", "method": "POST", "url": url, "body": body}).encode()


def main(arguments: Sequence[str] | None = None) -> int:
    """Print the table and write the JSON. Returns 0. Takes one to three minutes with the defaults."""
    options = parse(arguments)
    machine = QueueMachine.read()
    print(machine, flush=True)
    measurements: list[QueueMeasurement] = []
    for num_workers in options.workers:
        for _ in range(options.repeats):
            measurements.append(run_queue(num_workers, options.prompts))
            print(".", end="", flush=True)
    print("\n" + as_table(measurements))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(machine, measurements), indent=1) + "\n")
    return 0


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.queue", description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000, metavar="N", help="in each run, over all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="worker processes")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of each number of workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    if min(options.workers) < 1 or options.repeats < 1:
        parser.error("--workers and --repeats: at least 1")
    if not max(options.workers) <= options.prompts <= 50_000 * min(options.workers):
        parser.error("--prompts: at least one a worker, at most 50000 a worker")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    return options


if __name__ == "__main__":
    sys.exit(main())
