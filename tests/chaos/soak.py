"""Disturbs workers with the real engine by random faults for minutes: `python -m tests.chaos.soak --minutes 5`

Prints a table of what was done and what came of it. Exit code 1 unless nothing is missing, double or different.

`--rounds 200` disturbs workers with a fake engine and the default shard size by a Redis that goes back in time, once a
round: its append-only file cut by 0.1 to 3 s, or a replica promoted that lagged, while clients still write to the old
primary. It happens while a job with bad lines is planned, while records are written, between a submit and its plan, or
between a cancel and its effect. Then it is checked, in one moment, that no line is lost or twice in work, and at last
that every job that Redis still knows has ended by itself, with the records of an undisturbed run.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import sys
import tempfile
import threading
import time
import uuid
from collections import Counter
from collections.abc import Mapping
from contextlib import ExitStack, suppress
from functools import partial
from pathlib import Path
from typing import Any, cast

import redis

from engine.errors import EngineFatal
from tests.chaos.faults import RewindingRedis, SoakFaults, file_history
from tests.chaos.fleet import Fleet, FleetWorker, running_fleet
from tests.chaos.jobs import (
    Record,
    check_counters,
    check_nothing_is_left,
    check_wholeness,
    content,
    contents,
    impatient_client,
    insist,
    prompts,
    undisturbed,
)
from tests.chaos.real_engines import POOL_IS_WHOLE
from tests.chaos.worker_program import WorkerOptions
from tests.support.processes import wait_until
from tests.support.redis_servers import RestartableRedis, restartable_redis, tcp_proxy
from tests.support.request_lines import CHECKPOINT, GOAL, read_records, ticket_lines
from tests.support.workers import millrace
from worker.client import BatchClient
from worker.demo.tickets import GradedAnswers, Ticket, make_tickets
from worker.registry.errors import JobNotFound
from worker.registry.keys import Keys

MAX_TOKENS = 12
NUM_DIFFERENT = 40  # jobs; the others repeat them, so that the undisturbed run takes less time than the soak
TOPICS = tuple(f"You are assistant number {number}, and you answer the question of the user. " for number in range(8))

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

MOMENTS = (
    "while a job with bad lines is planned",
    "while records are written",
    "between submit and plan",
    "between cancel and its effect",
)
FAULTS = ("cut", "cut", "cut", "promotion")
ROUND_ENGINE = {"steps_per_request": 4, "step_s": 0.002, "slots": 16}
ROUND_SETTINGS = {
    "worker.lease_s": "2",
    "worker.renew_interval_s": "0.5",
    "worker.shard_size": "256",  # as shipped
}
ROUND_TIMEOUT_S = 60.0
BATCH_SIZE = 200  # worker.result_batch_size


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


def main() -> int:
    """Run the soak that the command line describes."""
    parser = argparse.ArgumentParser(description="Random faults on workers with the real engine.")
    parser.add_argument("--minutes", type=float, default=5.0)
    parser.add_argument("--workers", type=int, default=3)
    parser.add_argument("--jobs", type=int, default=200)
    parser.add_argument("--prompts", type=int, default=50, help="of each job")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--rounds", type=int, default=0, help="of a Redis that goes back in time, in place of minutes")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as name:
        directory = Path(name)
        if options.rounds:
            return _run_rounds(directory, options)
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


def _run_rounds(directory: Path, options: argparse.Namespace) -> int:
    chance = random.Random(options.seed)
    with ExitStack() as stack:
        histories = []
        for name in ("one", "two"):
            (directory / name).mkdir()
            one = stack.enter_context(restartable_redis(directory / name, is_durable=True))
            histories.append(stack.enter_context(file_history(one)))
        address, link = (stack.enter_context(tcp_proxy(histories[0].server.port)) for _ in range(2))
        server = RewindingRedis(histories, address=address, link=link, chance=chance)
        url = f"redis://127.0.0.1:{address.port}/0"
        program = WorkerOptions(engine=ROUND_ENGINE, visibility_timeout_s=10, notes_known=True)
        fleet = stack.enter_context(running_fleet(url, directory, program, ROUND_SETTINGS))
        client = stack.enter_context(impatient_client(url))
        for _ in range(options.workers):
            fleet.start()
        fleet.wait_up(client)
        rounds = SoakRounds(server, client, chance)
        for _ in range(options.rounds):
            rounds.run()
        suspects = sum(worker.log.count("crashed a worker before") for worker in fleet.workers)
        rewound = sum(worker.log.count("Redis has lost") for worker in fleet.workers)
        codes = fleet.stop()
    print("| what | number |\n|---|---|")
    figures = {"units given back as Redis had lost records or a plan": rewound, "suspects": suspects, **rounds.found}
    for what, number in {**rounds.counts, **figures}.items():
        print(f"| {what} | {number} |")
    print(f"\nRounds took {statistics.median(rounds.took_s):.1f} s (median), {max(rounds.took_s):.1f} s (longest).")
    return 0 if rounds.found.total() + suspects + sum(codes) + fleet.num_restarts == 0 else 1


class SoakRounds:
    """Rounds of two jobs each, one with bad lines, over which Redis goes back in time once."""

    def __init__(self, server: RewindingRedis, client: BatchClient, chance: random.Random) -> None:
        self.counts: Counter[str] = Counter()
        self.found: Counter[str] = Counter(hung=0, missing=0, duplicate=0, different=0)
        self.took_s: list[float] = []
        self._server = server
        self._client = client
        self._chance = chance
        self._files = [prompts(700, of="good"), prompts(900, of="mixed")]
        for line in self._files[1][::3]:
            line["n"] = "none"  # no number
        self._expected = list(map(undisturbed, self._files))

    def run(self) -> None:
        """One round; prints what went wrong."""
        began_s, moment = time.monotonic(), self._chance.choice(MOMENTS)
        self._server.wait_renewed()
        before = self._server.num_bytes
        job_ids = [self._submit(number) for number in range(2)]
        keep = self._server.num_bytes
        if moment != "between submit and plan":
            self._await(moment, job_ids[1])
        if moment == "between cancel and its effect":
            keep = self._server.num_bytes
            insist(partial(self._client.cancel, job_ids[1]))
            keep = self._chance.randint(keep, self._server.num_bytes)  # perhaps the cancel, and not what it led to
        fault = self._chance.choice(FAULTS)
        if fault == "promotion":
            self._server.split()
        else:
            self._server.cut(before if self._chance.random() < 0.2 else keep)
        self.counts[f"{fault} {moment}"] += 1
        with redis.Redis.from_url(self._server.url) as bare:
            is_ended = False
            while not is_ended and time.monotonic() < began_s + ROUND_TIMEOUT_S:
                check_wholeness(bare, batch_size=BATCH_SIZE)
                check_counters(bare)
                is_ended = not any(bare.hget(Keys().job(job_id), "st") in (b"queued", b"running") for job_id in job_ids)
            for number, job_id in enumerate(job_ids):
                self._compare(bare, job_id, self._expected[number])
        self.took_s.append(time.monotonic() - began_s)
        print(f"round {len(self.took_s)}: {fault} {moment}, {self.took_s[-1]:.1f} s", file=sys.stderr, flush=True)

    def _submit(self, number: int) -> str:
        key = uuid.uuid4().hex  # keeps a submit whose answer got lost from becoming a second job
        return insist(partial(self._client.submit, self._files[number], idempotency_key=key))

    def _await(self, moment: str, job_id: str) -> None:
        """Wait until the job is planned, or has records of its good lines; or is already over."""
        wanted = self._chance.randrange(1, 300) if moment == MOMENTS[0] else self._chance.randrange(300, 700)

        def has_come_so_far() -> bool:
            job = insist(partial(self._client.status, job_id))
            return job.request_counts.finished >= wanted or job.status.is_terminal

        wait_until(has_come_so_far)

    def _compare(self, bare: redis.Redis, job_id: str, expected: Expected) -> None:
        state = cast("bytes | None", bare.hget(Keys().job(job_id), "st"))
        if state is None:
            self.counts["jobs that Redis forgot"] += 1
            return
        if state in (b"queued", b"running"):
            self.found["hung"] += 1
            print(f"hung: {bare.hgetall(Keys().job(job_id))}", file=sys.stderr)
            return
        self.counts[f"jobs {state.decode()}"] += 1
        seen: Counter[str] = Counter()
        for record in insist(lambda: list(self._client.results(job_id))):
            seen[record["custom_id"]] += 1
            is_cancelled = state == b"cancelled" and (record["error"] or {}).get("code") == "batch_cancelled"
            if content(record) != expected.get(record["custom_id"]) and not is_cancelled:
                self.found["different"] += 1
                print(f"different, of {job_id}, {state!r}: {record}", file=sys.stderr)
        self.counts["records"] += seen.total()
        self.found["missing"] += len(expected.keys() - seen.keys())
        self.found["duplicate"] += sum(count - 1 for count in seen.values())


if __name__ == "__main__":
    sys.exit(main())
