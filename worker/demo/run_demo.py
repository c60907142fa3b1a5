"""The main job on one machine: a Redis, a worker, a job, its results."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import BinaryIO

from worker.client import BatchClient
from worker.demo.demo_console import DemoConsole
from worker.demo.demo_requests import demo_lines
from worker.demo.graded_answers import GradedAnswers, answer_text
from worker.demo.make_tickets import numbered_tickets
from worker.demo.private_redis import private_redis
from worker.demo.ticket import Ticket
from worker.schemas.job_status import JobStatus

MILLRACE = Path(sys.executable).with_name("millrace")
WORKER_START_TIMEOUT_S = 120.0
WORKER_STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
CHECKPOINT = Path(__file__).with_name("model")
NUM_TICKETS = 300
TICKETS_SEED = 8
GOAL = 0.95  # of the tickets right in every field
SHOWN_ANSWERS, SHOWN_WRONG = 3, 3


class DemoFailed(Exception):
    """The demo could not show what it is there to show."""


def run_demo(directory: Path, console: DemoConsole) -> None:
    """Run it, and stop everything it started; logs go into `directory`. Raises DemoFailed, NoRedisServer."""
    say = console.say
    say(f"model: {CHECKPOINT}: a Qwen3-MoE of 1.5 million parameters, trained for such tickets but on none of these")
    tickets = numbered_tickets(TICKETS_SEED, NUM_TICKETS)
    with private_redis(directory / "redis") as url:
        say("redis: a private server on this machine")
        with BatchClient(url) as client, _worker(url, directory / "worker.log") as worker:
            _wait_for_worker(client, worker, directory / "worker.log")
            say(f"worker: `millrace worker`, process {worker.pid}, log in {directory / 'worker.log'}")
            started_s = time.monotonic()
            job_id = client.submit(demo_lines(tickets), metadata={"made-by": "millrace demo"})
            say(f"job: {job_id}")
            job = _watch(client, job_id, worker, console)
            _report(client, job, tickets, time.monotonic() - started_s, console)


@contextmanager
def _worker(url: str, log_path: Path) -> Iterator[subprocess.Popen[bytes]]:
    """A worker process, asked to stop at the end; it must drain and exit 0."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("MILLRACE_")}
    environment["MILLRACE_REDIS__URL"] = url  # not on the command line, where `ps` would show the password
    # A model this small gains nothing from a second thread, and threads that wait for each other lose it all (10x)
    # wherever something else runs on the machine.
    environment["MILLRACE_ENGINE__NUM_THREADS"] = "1"
    with log_path.open("wb") as log:
        worker = _start([str(MILLRACE), "worker", "--model", str(CHECKPOINT)], environment, log)
    try:
        yield worker
    finally:
        worker.terminate()
        code = worker.wait(timeout=WORKER_STOP_TIMEOUT_S)
    if code != 0:
        raise DemoFailed(f"the worker exited with {code}; see {log_path}")


def _start(command: list[str], environment: Mapping[str, str], log: BinaryIO) -> subprocess.Popen[bytes]:
    return subprocess.Popen(command, env=dict(environment), stdout=log, stderr=subprocess.STDOUT)


def _wait_for_worker(client: BatchClient, worker: subprocess.Popen[bytes], log_path: Path) -> None:
    until_s = time.monotonic() + WORKER_START_TIMEOUT_S
    while not client.workers():
        if worker.poll() is not None or time.monotonic() > until_s:
            raise DemoFailed(f"the worker did not start; see {log_path}")
        time.sleep(POLL_S)


def _watch(client: BatchClient, job_id: str, worker: subprocess.Popen[bytes], console: DemoConsole) -> JobStatus:
    while True:
        job = client.status(job_id)
        counts, usage = job.request_counts, job.usage
        console.show(f"{job.status:12} {counts.finished:4}/{counts.total} prompts, {usage.output_tokens} tokens out")
        if job.status.is_terminal:
            return job
        if worker.poll() is not None:
            raise DemoFailed(f"the worker died with {worker.returncode}")
        time.sleep(POLL_S)


def _report(
    client: BatchClient, job: JobStatus, tickets: Mapping[str, Ticket], elapsed_s: float, console: DemoConsole
) -> None:
    say = console.say
    records = sorted(client.results(job.id), key=lambda record: str(record["custom_id"]))
    for record in records[:SHOWN_ANSWERS]:
        say(f"{record['custom_id']}: {tickets[record['custom_id']].text}\n         -> {answer_text(record)}")
    counts, usage = job.request_counts, job.usage
    say(f"{counts.completed} results and {counts.failed} errors for {counts.total} tickets in {elapsed_s:.1f} s")
    say(
        f"{counts.total / elapsed_s:.0f} tickets/s, {usage.output_tokens / elapsed_s:.0f} tokens/s out, "
        f"{usage.total_tokens / elapsed_s:.0f} tokens/s in all; prefix hit rate "
        f"{usage.cached_tokens / usage.input_tokens:.0%}"
    )
    graded = GradedAnswers.of_records(tickets, records)
    for ticket, answer in graded.wrong[:SHOWN_WRONG]:
        say(f"wrong: {ticket.text}\n         -> {answer}\n  instead of {json.dumps(ticket.fields)}")
    fields = ", ".join(f"{name} {right / graded.num_tickets:.1%}" for name, right in graded.num_right.items())
    say(f"accuracy {graded.accuracy:.1%}: {graded.num_exact} of {graded.num_tickets} right in every field ({fields})")
    if len(records) != counts.total or counts.failed:
        raise DemoFailed(f"{len(records)} records, {counts.failed} of them errors, for {counts.total} tickets")
    if graded.accuracy < GOAL:
        raise DemoFailed(f"accuracy {graded.accuracy:.1%}; the goal is {GOAL:.0%}")
