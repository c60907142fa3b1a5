"""Follows a job until it ends: shows how far it is, writes its records as they come, and says how it ended."""

from __future__ import annotations

import logging
import shlex
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal, TypeVar
from urllib.parse import urlsplit

import click
import redis
from pydantic import ValidationError

from settings import RedisSettings
from worker.acl import FLOWER, WORKER
from worker.cli.exit_codes import CommandError, Interrupted, printable, stop_signals
from worker.cli.failures import DEFAULT_MAX_FAILED, FailureCounts, MaxFailed
from worker.cli.files import GZIP_SUFFIX, STANDARD, RecordPaths, WriteRecord
from worker.cli.progress import Progress, ProgressBar, coloured, no_worker_serves
from worker.client import BatchClient
from worker.registry.connect import is_refusal_to_connect
from worker.schemas import JobState, JobStatus

POLL_S = 0.5

Answer = TypeVar("Answer")

# It takes a worker some time to plan a job, and its heartbeat comes every few seconds.
LOOK_AFTER_S = 2.0  # without a new record
LOOK_EVERY_S = 10.0  # the look goes through all keys of that Redis

NO_WORKER = "no worker is up (millrace worker --model DIR starts one)"


def may_list_workers(settings: RedisSettings) -> bool:
    """Whether this user may SCAN, which finds the workers. Redis would log the denial, so it is not tried."""
    return urlsplit(settings.url.get_secret_value()).username not in {WORKER.name, FLOWER.name}


class WorkerLookout:
    """Says that no worker is up, or none of the job's model, while nothing of the job moves."""

    def __init__(self, client: BatchClient, *, may_look: bool) -> None:
        """`may_look`: see may_list_workers."""
        self._client = client
        self._may_look = may_look
        self._num_done = -1
        self._moved_at_s = self._looked_at_s = float("-inf")
        self._is_missing = False

    def waits_for(self, job: JobStatus, now_s: float) -> str:
        """Why nothing moves, as far as it can be told; `now_s` of a monotonic clock. Raises redis.RedisError."""
        if job.request_counts.finished != self._num_done or job.status.is_terminal:
            self._num_done, self._moved_at_s, self._is_missing = job.request_counts.finished, now_s, False
        elif now_s - self._moved_at_s >= LOOK_AFTER_S and now_s - self._looked_at_s >= LOOK_EVERY_S:
            self._looked_at_s, self._is_missing = now_s, self._none_is_up()
        if job.waiting_for and now_s - self._moved_at_s >= LOOK_AFTER_S:
            return no_worker_serves(job.waiting_for[0])
        return NO_WORKER if self._is_missing else ""

    def _none_is_up(self) -> bool:
        if not self._may_look:
            return False
        try:
            return not self._client.workers()
        except ValidationError:  # a heartbeat of another version
            return False
        except redis.exceptions.NoPermissionError:
            self._may_look = False
            return False


@dataclass(frozen=True, slots=True)
class Followed:
    """A job and how it is waited for."""

    client: BatchClient
    job_id: str
    sees_workers: bool = True  # see may_list_workers
    plain_lines: bool = True  # where stderr is no terminal, a line every ten seconds
    options: str = ""  # what a command about the job needs beside its id

    def command(self, name: str) -> str:
        """Such a command."""
        return f"millrace {name} {self.job_id}{self.options}"

    @property
    def goes_on(self) -> str:
        """What is said on Ctrl-C."""
        return f"interrupted; the job goes on: {self.command('watch')}"


class JobBar:
    """Shows a job's progress on stderr."""

    def __init__(self, job: Followed) -> None:
        self._job = job
        self._bar = ProgressBar(sys.stderr, plain_lines=job.plain_lines)
        self._lookout = WorkerLookout(job.client, may_look=job.sees_workers)
        self._asked_at_s = float("-inf")
        self._has_answered = False

    def show(self) -> JobStatus:
        """The job's status, which is shown."""
        now_s = self._asked_at_s = time.monotonic()
        status = self._job.client.status(self._job.job_id)
        waits_for = self._lookout.waits_for(status, now_s) if self._bar.is_shown else ""
        self._bar.show(Progress.of_job(status, waits_for))
        return status

    def ask(self, question: Callable[[], Answer], should_stop: Callable[[], bool]) -> Answer | None:
        """What Redis answers. Once it has, it may go away: it is asked until it is back, or None if it is to stop."""
        is_away = False
        while not should_stop():
            try:
                answer = question()
            except (redis.ConnectionError, redis.TimeoutError) as error:
                if not self._has_answered or is_refusal_to_connect(error):
                    raise
                if not is_away:
                    self._bar.leave()
                    click.echo(f"millrace: Redis is away, asked until it is back: {printable(str(error))}", err=True)
                is_away = True
                time.sleep(POLL_S)
            else:
                self._has_answered = True
                return answer
        return None

    def show_if_due(self) -> None:
        """Show it if anything is shown, at most every POLL_S."""
        if self._bar.is_shown and time.monotonic() - self._asked_at_s >= POLL_S:
            self.show()

    def leave(self) -> None:
        """End the bar's line."""
        self._bar.leave()


class _Warnings(logging.Handler):
    """Gives what the client logs, such as that Redis went back, a line of its own below the bar."""

    def __init__(self, bar: JobBar) -> None:
        super().__init__(logging.WARNING)
        self._bar = bar

    def emit(self, record: logging.LogRecord) -> None:
        """Print the message on stderr."""
        self._bar.leave()
        click.echo(f"millrace: {printable(record.getMessage())}", err=True)


@contextmanager
def shown(job: Followed) -> Iterator[JobBar]:
    """The job's bar, whose line ends with the block, so that an error has one of its own."""
    bar = JobBar(job)
    warnings, root = _Warnings(bar), logging.getLogger()
    root.addHandler(warnings)
    try:
        yield bar
    finally:
        root.removeHandler(warnings)
        bar.leave()


def follow_job(job: Followed, on_change: Callable[[JobStatus], None] = lambda status: None) -> JobStatus:
    """Poll until the job has ended; `on_change` gets each new status. Raises Interrupted on Ctrl-C."""
    told = None
    with stop_signals(signal.SIGINT) as should_stop, shown(job) as bar:
        while (status := bar.ask(bar.show, should_stop)) is not None:
            if status != told:
                on_change(status)
                told = status
            if status.status.is_terminal:
                return status
            time.sleep(POLL_S)
    raise Interrupted(job.goes_on)


@dataclass(frozen=True, slots=True)
class Reading:
    """Which records of a job are written where."""

    paths: RecordPaths
    write: WriteRecord
    cursor: str = "0"  # of the records left out
    order: Literal["completion", "input"] = "completion"

    def rest_options(self, cursor: str) -> str:
        """What `results` gets the records after `cursor` with; where there are two files, all of them once more.

        `results -o FILE` replaces a file, so it is the shell that appends.
        """
        name, errors = self.paths.output, self.paths.errors
        order = "" if self.order == "completion" else f" --order {self.order}"
        if errors is not None:
            again = "" if self.cursor == "0" else f" --cursor {self.cursor}"
            return f" --follow{order}{again} -o {shlex.quote(name)} --errors-file {shlex.quote(errors)}"
        options = f" --follow{order} --cursor {cursor}"
        if name == STANDARD:
            return options
        return f"{options} {'| gzip ' if name.endswith(GZIP_SUFFIX) else ''}>> {shlex.quote(name)}"


def follow_records(job: Followed, reading: Reading) -> JobStatus:
    """Write the records as they come until the job has ended. Raises Interrupted on Ctrl-C, after a whole record.

    Progress is shown unless the records go to standard output, which may be the same terminal.
    """
    num_written, is_shown = 0, reading.paths.output != STANDARD
    with stop_signals(signal.SIGINT) as should_stop, shown(job) as bar:
        pages = job.client.pages(job.job_id, reading.cursor, follow=True, order=reading.order)
        while (page := bar.ask(lambda: next(pages, None), should_stop)) is not None:
            for record in page:
                reading.write(record)
                num_written += 1
                if should_stop():
                    break
            if is_shown:
                bar.ask(bar.show_if_due, should_stop)
        status = bar.ask(bar.show if is_shown else lambda: job.client.status(job.job_id), should_stop)
        if status is None:
            rest = f"{job.command('results')}{reading.rest_options(pages.cursor)}"
            raise Interrupted(f"{job.goes_on}\n{num_written} records are written; to go on: {rest}")
        return status


def require_completed(job: JobStatus, max_failed: MaxFailed | None = None) -> None:
    """Raise CommandError (exit 1) for a job that failed, expired or was cancelled, or of which too much failed."""
    if not job.status.is_terminal:
        return
    if job.status is not JobState.COMPLETED:
        ended = "was cancelled" if job.status is JobState.CANCELLED else job.status.value
        reason = f": {printable(job.error)}" if job.error else ""
        raise CommandError(f"job {job.id} {ended}{reason}")
    counts = job.request_counts
    (max_failed or DEFAULT_MAX_FAILED).check(counts.failed, counts.total, f"job {job.id}")


def show_failures(job: Followed, status: JobStatus, failures: FailureCounts) -> None:
    """Sum up on stderr what failed, if anything did, with the command that shows it."""
    if failures.total:
        text = failures.text(status.request_counts.total, f"{job.command('errors')} shows them:")
        click.echo(coloured(text, "red"), err=True)


def failures_of(client: BatchClient, status: JobStatus) -> FailureCounts:
    """The failures of a job that has ended. Reads no further than the last of them."""
    failures = FailureCounts()
    if not status.request_counts.failed:
        return failures
    for record in client.results(status.id):
        failures.add(record)
        if failures.total == status.request_counts.failed:
            break
    return failures
