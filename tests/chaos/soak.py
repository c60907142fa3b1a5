"""Disturbs workers with the real engine by random faults for minutes: `python -m tests.chaos.soak --minutes 5`

Prints a table of what was done and what came of it. Exit code 1 unless nothing is missing, double or different.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import redis

from engine.errors import EngineFatal
from tests.chaos.faults import drop_connections, duplicate_message, junk_frame, steal_message
from tests.chaos.fleet import Fleet, FleetWorker, running_fleet
from tests.chaos.jobs import Record, check_counters, check_nothing_is_left, content, contents, impatient_client, insist
from tests.chaos.real_engines import POOL_IS_WHOLE
from tests.chaos.worker_program import WorkerOptions
from tests.support.engines import CHECKPOINT, GOAL, ticket_lines
from tests.support.processes import wait_until
from tests.support.redis_servers import RestartableRedis, restartable_redis
from tests.support.request_lines import read_records
from tests.support.workers import millrace
from worker.client import BatchClient
from worker.demo.tickets import GradedAnswers, Ticket, make_tickets
from worker.registry.errors import JobNotFound

MAX_TOKENS = 12
NUM_DIFFERENT = 40  # jobs; the others repeat them, so that the undisturbed run takes less time than the soak
TOPICS = tuple(f"You are assistant number {number}, and you answer the question of the user. " for number in range(8))

REDIS_DOWN_S = 0.5

LEASE_S = 3.0
SETTINGS = {
    "worker.lease_s": str(LEASE_S),
    "worker.renew_interval_s": "0.75",
    "worker.reap_interval_s": "0.5",
    "worker.reap_grace_s": "1",
    "worker.drain_timeout_s": "1",
    "worker.concurrency": "6",
    # Faults are hundreds of times as frequent as in life, so a prompt that was there each time is not to blame.
    "worker.max_attempts": "100",
}
SUBMITTED_BY = 0.8  # of the time; in the rest the queue only drains
PAUSES_S = (0.7, 2.3)  # between faults; a restarted worker needs three seconds of a core to be back
SETTLE_TIMEOUT_S = 300.0
START_TIMEOUT_S = 120.0

Expected = Mapping[str, Record]


class SoakWork:
    """Jobs on the demo's model: half of the lines are tickets, answered greedily by schema, the others seeded texts."""

    def __init__(self, directory: Path, num_jobs: int, num_prompts: int) -> None:
        asked = make_tickets(seed=3, held_out=True)
        different = [[next(asked) for _ in range(0, num_prompts, 2)] for _ in range(min(num_jobs, NUM_DIFFERENT))]
        self.tickets: dict[str, Ticket] = {}
        self.jobs: list[list[Mapping[str, Any]]] = []
        for job in range(num_jobs):
            kind = job % NUM_DIFFERENT
            tickets = {f"{job}-{2 * number}": ticket for number, ticket in enumerate(different[kind])}
            self.tickets |= tickets
            texts = [_text_line(job, kind, number) for number in range(1, num_prompts, 2)]
            self.jobs.append([*ticket_lines(tickets), *texts])
        self.engine_settings = {
            "model.path": str(CHECKPOINT),
            "engine.device": "cpu",
            "engine.dtype": "float32",
            "engine.num_threads": "1",
            "engine.max_num_seqs": "32",
            "engine.kv_cache.num_blocks": "600",
            "engine.deterministic": "true",
        }
        self._directory = directory

    def undisturbed(self) -> dict[str, Record]:
        """The contents of every job's records by custom_id, from one `millrace run`.

        Raises RuntimeError unless that run answers the tickets right: else a comparison with it would mean nothing.
        """
        source, target = self._directory / "all.jsonl", self._directory / "undisturbed.jsonl"
        source.write_text("".join(json.dumps(line) + "\n" for job in self.jobs[:NUM_DIFFERENT] for line in job))
        options = [word for name, value in self.engine_settings.items() for word in ("--set", f"{name}={value}")]
        done = millrace("run", "-i", source, "-o", target, *options, timeout_s=600)
        if done.returncode:
            raise RuntimeError(done.stderr.decode())
        found = contents(read_records(target))
        graded = GradedAnswers.of_records(
            {name: self.tickets[name] for name in found.keys() & self.tickets}, found.values()
        )
        if graded.accuracy < GOAL:
            raise RuntimeError(
                f"{graded.num_exact} of {graded.num_tickets} tickets are answered right: {graded.wrong[:3]}"
            )
        return {
            line["custom_id"]: {**found[f"{job % NUM_DIFFERENT}-{number}"], "custom_id": line["custom_id"]}
            for job, lines in enumerate(self.jobs)
            for line in lines
            for number in [line["custom_id"].partition("-")[2]]
        }


def _text_line(job: int, kind: int, number: int) -> Mapping[str, Any]:
    body = {
        "prompt": f"{TOPICS[kind % len(TOPICS)]}Question {number} of kind {kind}?",
        "max_tokens": MAX_TOKENS,
        "temperature": 0.9,
        "top_p": 0.9,
        "seed": 1000 * kind + number,
    }
    return {"custom_id": f"{job}-{number}", "method": "POST", "url": "/v1/completions", "body": body}


class SoakFaults:
    """Hurts the workers of a fleet and its Redis, and counts."""

    def __init__(self, fleet: Fleet, server: RestartableRedis, *, freeze_s: float, seed: int) -> None:
        self.counts: Counter[str] = Counter()
        self._fleet = fleet
        self._server = server
        self._bare = redis.Redis.from_url(server.url)
        self._freeze_s = freeze_s  # longer than a lease
        self._random = random.Random(seed)
        self._thaws: list[threading.Timer] = []
        # Kind -> (its weight, what is done; that returns False if there was nothing to do it to).
        self._faults: dict[str, tuple[int, Callable[[], object]]] = {
            "SIGKILL of a worker": (2, lambda: self._hurt_one(FleetWorker.kill)),
            "SIGTERM of a worker": (2, lambda: self._hurt_one(FleetWorker.terminate)),
            "SIGSTOP past the lease": (2, lambda: self._hurt_one(self._freeze)),
            "CLIENT KILL of all connections": (2, lambda: drop_connections(self._bare)),
            "Redis SIGKILL": (1, self._kill_redis),
            "duplicated message": (4, lambda: duplicate_message(self._bare)),
            "stolen message": (4, lambda: steal_message(self._bare)),
            "junk frame": (4, lambda: junk_frame(self._bare)),
        }

    def inject(self) -> None:
        """One fault, chosen by its weight."""
        kinds = list(self._faults)
        (kind,) = self._random.choices(kinds, [self._faults[name][0] for name in kinds])
        try:
            happened = self._faults[kind][1]()
        except redis.RedisError:
            return  # our own connection was hit by an earlier fault
        if happened is not False:
            self.counts[kind] += 1

    def stop(self) -> None:
        """Thaw what is frozen."""
        for thaw in self._thaws:
            thaw.cancel()
        for worker in self._fleet.workers:
            worker.thaw()
        self._bare.close()

    def _hurt_one(self, hurt: Callable[[FleetWorker], None]) -> bool:
        """Hurt a worker that is up: one that loads has no work yet."""
        workers = [worker for worker in self._fleet.workers if worker.is_up]
        if workers:
            hurt(self._random.choice(workers))
        return bool(workers)

    def _freeze(self, worker: FleetWorker) -> None:
        worker.freeze()
        thaw = threading.Timer(self._freeze_s, worker.thaw)
        thaw.daemon = True
        self._thaws.append(thaw)
        thaw.start()

    def _kill_redis(self) -> None:
        self._server.kill()
        time.sleep(REDIS_DOWN_S)
        self._server.start()


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
    """Whether no life of a worker found its KV pool wrong, and the last found it right when it ended in peace."""
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
                # The key keeps a submit whose answer got lost from becoming a second job.
                job_ids.append(insist(partial(client.submit, lines, idempotency_key=f"job {number}"), 120))

    submitter = threading.Thread(target=submit, name="submitter")
    submitter.start()
    with redis.Redis.from_url(server.url) as bare:
        while time.monotonic() < until_s:
            faults.inject()
            time.sleep(chance.uniform(*PAUSES_S))
            insist(lambda: check_counters(bare))
    submitter.join()
    return job_ids


def _settle(client: BatchClient, job_ids: list[str]) -> float:
    """Seconds until the last job has ended."""
    began_s = time.monotonic()
    for job_id in job_ids:
        left_s = SETTLE_TIMEOUT_S - (time.monotonic() - began_s)
        with suppress(TimeoutError, JobNotFound):  # its records are then counted as missing
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
