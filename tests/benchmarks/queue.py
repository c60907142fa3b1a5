"""Measures what the queue costs without a model, and whether a shard ever waits beside an idle worker.

`python -m tests.benchmarks.queue [--prompts N] [--workers 1 2 4] [--repeats N] [--jobs N [--callbacks]] [--json FILE]`
`python -m tests.benchmarks.queue --waits [--rule plain|tenants|priorities|suspects] --workers 4 --repeats 200`

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
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any

from redis import Redis

from settings import LimitSettings, WorkerSettings
from tests.benchmarks.machine import QueueMachine, cpu_time_s
from tests.support.processes import wait_until
from tests.support.redis_servers import free_port, private_redis
from tests.support.registry import WaitWatch
from tests.support.tiny_tokenizer import make_tokenizer
from worker.client import BatchClient
from worker.records.record import has_failed
from worker.registry.keys import Keys, UnitRef
from worker.registry.leases import Claim, UnitLeases
from worker.schemas import SubmitArguments

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

WAITS_EXPLANATION = """\
time: from the jobs' acceptance to their last record
wait: how long a shard lay in Redis unclaimed while a worker that may run it had a free slot, by Redis' clock; where its
worker died, since another may claim it: when the lease is over and the reapers know of the death. Redis is looked at
{rate:.0f} times a second, and a wait is taken to reach from the look before the first that saw it to the look that saw
it no more: never less than it was. Longest time between two looks: {gap_s:.2f} s."""
MOST_TIMES_MEDIAN, MOST_WAIT_S = 1.5, 1.0  # what the longest run and the longest wait may come to
NUM_SUSPECTS = 3  # shards of each run whose first worker dies
# Of all workers where some die: a lease is renewed six times as shipped, and of 30 s each run would last as long.
LEASE_S, RENEWALS = 3.0, 6

# The jobs of a run, by what decides whose turn it is.
RULES: Mapping[str, Sequence[SubmitArguments]] = {
    "plain": [{}],
    "tenants": [{"tenant": "a"}, {"tenant": "b"}, {"tenant": "c"}],
    "priorities": [{"priority": 0}, {"priority": 5}, {"priority": 9}],
    "suspects": [{}],
}

DONE = "done"  # a queue where nobody takes what callbacks bring

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
    """One run: jobs, as many for each worker, accepted at the same moment. CPU times are of all threads, in seconds."""

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


def run_queue(
    num_workers: int, num_prompts: int, num_jobs: int = 1, *, has_callbacks: bool = False
) -> QueueMeasurement:
    """Measure `num_jobs` jobs for each worker, `num_prompts` prompts in all; with callbacks each sends a task."""
    settings = [f"limits.callback_queues={DONE}"] if has_callbacks else []
    limits = LimitSettings(callback_queues=DONE if has_callbacks else None)
    rule: list[SubmitArguments] = [{"on_done": f"task:benchmark.done@{DONE}"} if has_callbacks else {}]
    with tempfile.TemporaryDirectory() as name:
        directory, sizes = Path(name), _parts(num_prompts, num_workers * num_jobs)
        make_tokenizer(directory / "model")
        with (
            private_redis(directory, port=free_port()) as url,
            BatchClient(url, limits=limits) as client,
            Redis.from_url(url) as redis,
            queue_workers(url, directory, num_workers, settings) as pids,
        ):
            wait_until(lambda: len(client.workers()) == num_workers, timeout_s=START_TIMEOUT_S)
            for job_id in _submit_together(client, [WARM_UP_PROMPTS] * num_workers, lambda: None):
                client.wait(job_id, RUN_TIMEOUT_S)
            measured = _measure(client, pids, int(redis.info("server")["process_id"]), sizes, rule)
            wait_until(lambda: redis.llen(DONE) == len(sizes) * has_callbacks)
            return measured


def _measure(
    client: BatchClient, worker_pids: Sequence[int], redis_pid: int, sizes: Sequence[int], rule: list[SubmitArguments]
) -> QueueMeasurement:
    num_prompts, staged = sum(sizes), list[tuple[float, float]]()
    workers_s, redis_s, own_s = cpu_time_s(worker_pids), cpu_time_s([redis_pid]), time.process_time()
    job_ids = _submit_together(
        client, sizes, lambda: staged.append((cpu_time_s([redis_pid]), time.process_time())), rule
    )
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


def _submit_together(
    client: BatchClient, sizes: Sequence[int], on_staged: Callable[[], None], rule: Sequence[SubmitArguments] = ({},)
) -> list[str]:
    """Submit a job of each size; none is accepted before the lines of all are on their way, when `on_staged` runs."""
    barrier = threading.Barrier(len(sizes), action=on_staged)

    def lines(num_lines: int) -> Iterator[bytes]:
        yield from queue_lines(num_lines)
        barrier.wait(RUN_TIMEOUT_S)

    options = [rule[position % len(rule)] for position in range(len(sizes))]
    with ThreadPoolExecutor(len(sizes)) as pool:
        return list(pool.map(lambda size, given: client.submit(lines(size), **given), sizes, options))


def _check_records(client: BatchClient, job_ids: Sequence[str], num_prompts: int) -> None:
    """Read every record: a run that lost a prompt, or failed one, has measured something else.

    None is kept: a collection of garbage that looked at all of them and at torch's objects took half of the time.
    """
    num_read = num_good = 0
    for job_id in job_ids:
        for record in client.results(job_id):
            num_read += 1
            num_good += not has_failed(record)
    if num_good != num_prompts or num_read != num_prompts:
        raise AssertionError(f"{num_read} records, {num_good} of them good, of {num_prompts} prompts")


@dataclass(frozen=True)
class WaitMeasurement:
    """One run of some jobs on workers that stay."""

    total_s: float  # from acceptance to the last record
    longest_wait_s: float  # of a shard that nobody held though a worker that may run it had a free slot
    longest_held_by_dead_s: float  # of a shard whose worker died, until another might claim it
    longest_gap_s: float  # between two looks, so the least that could be told
    num_looks: int
    num_suspects: int  # shards whose first worker died


def run_waits(
    rule: str, num_workers: int, num_prompts: int, repeats: int, *, lease_s: float = LEASE_S
) -> Iterator[WaitMeasurement]:
    """Run the jobs again and again, one for each worker, `num_prompts` prompts in all, on the same workers.

    `lease_s`: of the workers, where some die.
    """
    dying = WorkerSettings(lease_s=lease_s, renew_interval_s=lease_s / RENEWALS)
    settings = [f"worker.{name}={getattr(dying, name)}" for name in ("lease_s", "renew_interval_s")]
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        make_tokenizer(directory / "model")
        with (
            private_redis(directory, port=free_port()) as url,
            BatchClient(url) as client,
            Redis.from_url(url) as redis,
            queue_workers(url, directory, num_workers, settings if rule == "suspects" else ()),
        ):
            wait_until(lambda: len(client.workers()) == num_workers, timeout_s=START_TIMEOUT_S)
            for number in range(-1, repeats):
                measured = _run_watched(client, redis, rule, _parts(num_prompts, num_workers), dying)
                if number >= 0:  # the first warms up
                    yield measured


def _run_watched(
    client: BatchClient, redis: Redis, rule: str, sizes: Sequence[int], dying: WorkerSettings
) -> WaitMeasurement:
    workers = {worker.id: worker.model for worker in client.workers()}
    watch = WaitWatch(redis, workers.keys(), WorkerSettings().concurrency)
    job_ids = _submit_together(client, sizes, lambda: None, RULES[rule])
    stopping = threading.Event()
    with ThreadPoolExecutor(1) as pool:
        watching = pool.submit(watch.run, job_ids, stopping)
        try:
            suspects = _make_suspects(redis, job_ids, next(iter(workers.values())), dying) if rule == "suspects" else []
            jobs = [client.wait(job_id, RUN_TIMEOUT_S) for job_id in job_ids]
        finally:
            stopping.set()
        watching.result()
    for job in jobs:
        if job.request_counts.completed != job.request_counts.total:
            raise AssertionError(f"{job.request_counts}: prompts failed")
        client.delete(job.id)
    return WaitMeasurement(
        total_s=max(job.finished_at or 0.0 for job in jobs) - min(job.created_at for job in jobs),
        longest_wait_s=watch.longest_wait_s,
        longest_held_by_dead_s=watch.longest_held_by_dead_s,
        longest_gap_s=watch.longest_gap_s,
        num_looks=watch.num_looks,
        num_suspects=len(suspects),
    )


def _make_suspects(redis: Redis, job_ids: Sequence[str], model: str, settings: WorkerSettings) -> list[Claim]:
    """Claim shards as a worker that dies at once."""
    leases = UnitLeases(redis, Keys(), owner="dead", settings=settings, models=[model])
    claims: list[Claim] = []
    left = set(job_ids)
    while left and len(claims) < NUM_SUSPECTS:
        for job_id in tuple(left):
            state, num_shards = redis.hmget(Keys().job(job_id), "st", "ns")
            if state != b"queued":
                left.remove(job_id)
                numbers = reversed(range(int(num_shards or 0)))
                found = (leases.claim(UnitRef.shard(job_id, number)) for number in numbers)
                claims += [claim for claim in found if isinstance(claim, Claim)][: NUM_SUSPECTS - len(claims)]
    return claims


def _report_waits(rule: str, runs: Sequence[WaitMeasurement]) -> bool:
    """Print what the runs came to; whether it is within the bounds."""
    times, wait_s = [run.total_s for run in runs], max(run.longest_wait_s for run in runs)
    middle = median(times)
    suspects = ""
    if rule == "suspects":
        held_s = max(run.longest_held_by_dead_s for run in runs)
        suspects = f", {sum(run.num_suspects for run in runs)} shards whose worker died, held for {held_s:.2f} s by it"
    print(
        f"\n{rule}: {len(runs)} runs{suspects}; median {middle:.2f} s, longest {max(times):.2f} s, "
        f"{max(times) / middle:.2f} times the median (at most {MOST_TIMES_MEDIAN}); longest wait {wait_s:.2f} s "
        f"(at most {MOST_WAIT_S:g})"
    )
    rate = sum(run.num_looks for run in runs) / sum(times)
    print(WAITS_EXPLANATION.format(rate=rate, gap_s=max(run.longest_gap_s for run in runs)))
    return max(times) <= MOST_TIMES_MEDIAN * middle and wait_s <= MOST_WAIT_S


def _parts(total: int, count: int) -> list[int]:
    return [total // count + (position < total % count) for position in range(count)]


@contextmanager
def queue_workers(redis_url: str, directory: Path, count: int, settings: Sequence[str] = ()) -> Iterator[list[int]]:
    """Start workers with the tokenizer in `directory`/model and stop them at the end; their process ids."""
    command = [
        sys.executable,
        "-m",
        "tests.benchmarks.queue_worker",
        str(directory / "model"),
        f"redis.url={redis_url}",
        *settings,
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
    """Print the table and write the JSON. Takes one to three minutes with the defaults.

    Returns 0; with --waits 1 where a run or a wait took longer than it may.
    """
    options = parse(arguments)
    machine = QueueMachine.read()
    print(machine, flush=True)
    if options.waits:
        return _main_waits(options, machine)
    measurements: list[QueueMeasurement] = []
    for num_workers in options.workers:
        for _ in range(options.repeats):
            run = run_queue(num_workers, options.prompts, options.jobs, has_callbacks=options.callbacks)
            measurements.append(run)
            print(".", end="", flush=True)
    print("\n" + as_table(measurements))
    if options.json is not None:
        options.json.write_text(json.dumps(as_json(machine, measurements), indent=1) + "\n")
    return 0


def _main_waits(options: argparse.Namespace, machine: QueueMachine) -> int:
    [num_workers] = options.workers
    runs: list[WaitMeasurement] = []
    for run in run_waits(options.rule, num_workers, options.prompts, options.repeats, lease_s=options.lease_s):
        runs.append(run)
        held = f", held by the dead {run.longest_held_by_dead_s:.2f} s" if run.num_suspects else ""
        print(f"{run.total_s:.2f} s, longest wait {run.longest_wait_s:.2f} s{held}", flush=True)
    is_within = _report_waits(options.rule, runs)
    if options.json is not None:
        figures = {"machine": asdict(machine), "rule": options.rule, "runs": [asdict(run) for run in runs]}
        options.json.write_text(json.dumps(figures, indent=1) + "\n")
    return 0 if is_within else 1


def parse(arguments: Sequence[str] | None) -> argparse.Namespace:
    """Parse the command line; exit with 2 and one line if an argument cannot be used."""
    parser = argparse.ArgumentParser(prog="python -m tests.benchmarks.queue", description=__doc__)
    parser.add_argument("--prompts", type=int, default=20_000, metavar="N", help="in each run, over all workers")
    parser.add_argument("--workers", type=int, nargs="+", default=[1, 2, 4], metavar="N", help="worker processes")
    parser.add_argument("--repeats", type=int, default=2, metavar="N", help="runs of each number of workers")
    parser.add_argument("--jobs", type=int, default=1, metavar="N", help="jobs a worker, which share the prompts")
    parser.add_argument("--callbacks", action="store_true", help="each job tells a Celery task that it has ended")
    parser.add_argument("--waits", action="store_true", help="run after run on workers that stay: how long shards wait")
    parser.add_argument("--rule", choices=RULES, default="plain", help="with --waits: what decides whose turn it is")
    parser.add_argument("--lease-s", type=float, default=LEASE_S, metavar="S", help="with --rule suspects: of workers")
    parser.add_argument("--json", type=Path, metavar="FILE", help="also write the figures as JSON")
    options = parser.parse_args(arguments)
    if min(options.workers) < 1 or min(options.repeats, options.jobs) < 1:
        parser.error("--workers, --repeats and --jobs: at least 1")
    if not 0.5 <= options.lease_s <= RUN_TIMEOUT_S / 2:
        parser.error(f"--lease-s: 0.5 to {RUN_TIMEOUT_S / 2:g}")
    if options.waits and len(options.workers) != 1:
        parser.error("--workers: one number with --waits")
    if not max(options.workers) * options.jobs <= options.prompts <= 50_000 * min(options.workers):
        parser.error("--prompts: at least one a job, at most 50000 a worker")
    if options.json and not options.json.absolute().parent.is_dir():
        parser.error(f"--json: {options.json.absolute().parent} is no directory")
    return options


if __name__ == "__main__":
    sys.exit(main())
