"""Minutes of random faults on workers with the real engine: `python -m tests.chaos.soak --minutes 5`

Prints a table of what was done and what came of it. Exit code 1 unless nothing is missing, double or different.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path

import redis

from engine.errors import EngineFatal
from tests.chaos.checked_engine import POOL_IS_WHOLE
from tests.chaos.fleet import Fleet, running_fleet
from tests.chaos.fleet_worker import FleetWorker
from tests.chaos.invariants import check_admission, check_nothing_is_left
from tests.chaos.jobs import impatient_client, insist
from tests.chaos.soak_faults import SoakFaults
from tests.chaos.soak_work import SoakWork
from tests.chaos.undisturbed import Record, content
from tests.chaos.worker_options import WorkerOptions
from tests.support.restartable_redis import RestartableRedis, restartable_redis
from tests.support.wait_until import wait_until
from worker.client import BatchClient
from worker.registry.errors import JobNotFound

LEASE_S = 3.0
SETTINGS = {
    "worker.lease_s": str(LEASE_S),
    "worker.renew_interval_s": "0.75",
    "worker.reap_interval_s": "0.5",
    "worker.reap_grace_s": "1",
    "worker.drain_timeout_s": "1",
    "worker.concurrency": "6",
    # Faults are hundreds of times as frequent as in life: that a prompt was there each time says nothing about it.
    "worker.max_attempts": "100",
}
SUBMITTED_BY = 0.8  # of the time: then the queue only drains
PAUSES_S = (0.7, 2.3)  # between faults; a restarted worker needs three seconds of a core to be back
SETTLE_TIMEOUT_S = 300.0
START_TIMEOUT_S = 120.0

Expected = Mapping[str, Record]


def main() -> int:
    """Run the soak that the command line describes."""
    parser = argparse.ArgumentParser(description="Random faults on workers with the real engine.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=50, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        work = SoakWork(directory, options.jobs, options.prompts)
        expected = work.undisturbed()
        with restartable_redis(directory, is_durable=True) as server:
            return _soak(work, expected, server, directory, options)


def _soak(
    work: SoakWork, expected: Expected, server: RestartableRedis, directory: Path, options: argparse.Namespace
) -> int:
    settings = SETTINGS | work.engine_settings | {"worker.shard_size": "10"}
    program = WorkerOptions(visibility_timeout_s=10)
    with running_fleet(server.url, directory, program, settings) as fleet, impatient_client(server.url) as client:
        for _ in range(options.workers):
            fleet.start()
        wait_until(lambda: all(worker.is_up for worker in fleet.workers), timeout_s=START_TIMEOUT_S)
        faults = SoakFaults(fleet, server, freeze_s=LEASE_S + 1, seed=options.seed)
        until_s = time.monotonic() + 60 * options.minutes
        job_ids = _disturb(work, server, faults, until_s, random.Random(options.seed))
        faults.stop()
        settle_s = _settle(client, job_ids)
        found = _compare(client, job_ids, expected)
        _print_table(options, faults.counts, found, fleet, settle_s)
        with redis.Redis.from_url(server.url) as bare:
            check_nothing_is_left(bare)
        wait_until(lambda: all(worker.is_up for worker in fleet.workers), timeout_s=START_TIMEOUT_S)
        codes = fleet.stop()
    pools = "whole" if (is_whole := all(map(_is_whole, fleet.workers))) else "NOT whole"
    print(f"\nAt the end: counters, `open`, lanes and `unacked` empty; exit codes {codes}; KV pools {pools}.")
    return 0 if sum(found.values()) == 0 and is_whole and not any(codes) else 1


def _is_whole(worker: FleetWorker) -> bool:
    """No life found its KV pool wrong, and the last one, which ended in peace, found it right at its end."""
    return EngineFatal.__name__ not in worker.log and POOL_IS_WHOLE in worker.log_of_life


def _disturb(
    work: SoakWork, server: RestartableRedis, faults: SoakFaults, until_s: float, chance: random.Random
) -> list[str]:
    """Submit on one thread while faults happen on this one; the jobs' ids."""
    job_ids: list[str] = []
    begin_s = time.monotonic()
    each_s = (until_s - begin_s) * SUBMITTED_BY / len(work.jobs)

    def submit() -> None:
        with impatient_client(server.url) as client:
            for number, lines in enumerate(work.jobs):
                time.sleep(max(begin_s + number * each_s - time.monotonic(), 0))
                # By its key: a submit whose answer got lost is not a second job.
                job_ids.append(insist(partial(client.submit, lines, idempotency_key=f"job {number}"), 120))

    submitter = threading.Thread(target=submit, name="submitter")
    submitter.start()
    with redis.Redis.from_url(server.url) as bare:
        while time.monotonic() < until_s:
            faults.inject()
            time.sleep(chance.uniform(*PAUSES_S))
            insist(lambda: check_admission(bare))
    submitter.join()
    return job_ids


def _settle(client: BatchClient, job_ids: list[str]) -> float:
    """Seconds until the last job has ended."""
    began_s = time.monotonic()
    for job_id in job_ids:
        left_s = SETTLE_TIMEOUT_S - (time.monotonic() - began_s)
        with suppress(TimeoutError, JobNotFound):  # its records are missing then, and counted so
            insist(partial(client.wait, job_id, max(left_s, 0.1)))
    return time.monotonic() - began_s


def _compare(client: BatchClient, job_ids: list[str], expected: Expected) -> Counter[str]:
    seen: Counter[str] = Counter()
    found: Counter[str] = Counter(missing=0, duplicate=0, different=0)
    for job_id in job_ids:
        with suppress(JobNotFound):
            for record in client.results(job_id):
                name = record["custom_id"]
                seen[name] += 1
                if content(record) != expected[name]:
                    found["different"] += 1
                    print(f"different: {record}\nexpected: {expected[name]}", file=sys.stderr)
    found["missing"] = len(expected.keys() - seen.keys())
    found["duplicate"] = sum(count - 1 for count in seen.values())
    return found


def _print_table(
    options: argparse.Namespace, faults: Counter[str], found: Counter[str], fleet: Fleet, settle_s: float
) -> None:
    exits = Counter(code for worker in fleet.workers for code in worker.exit_codes)
    rows: list[tuple[str, object]] = [
        ("minutes, workers", f"{options.minutes:g}, {options.workers}"),
        ("jobs x prompts", f"{options.jobs} x {options.prompts}"),
        *sorted(faults.items()),
        ("faults", faults.total()),
        ("workers started again", fleet.num_restarts),
        ("exit codes of ended workers", ", ".join(f"{code}: {count}" for code, count in sorted(exits.items()))),
        *found.items(),
        ("settled after", f"{settle_s:.1f} s"),
    ]
    print("| what | number |\n|---|---|")
    for what, number in rows:
        print(f"| {what} | {number} |")


if __name__ == "__main__":
    sys.exit(main())
