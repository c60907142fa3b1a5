"""Writes a job's records into object storage: an object of an ended job, whole, by as many writers as may try."""

from __future__ import annotations

import shlex
import signal
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Literal

import click

from worker.cli.exit_codes import BadUsage, CommandError, Interrupted, stop_signals
from worker.cli.failures import FailureCounts
from worker.cli.files import RecordPaths, record_output
from worker.cli.follow import Followed, failures_of, shown
from worker.schemas import JobStatus
from worker.storage.objects import holds_object
from worker.storage.urls import StorageError, is_url, object_url

MAX_READINGS = 3  # of a job that Redis changes under the reading, by going back to an earlier state


def has_objects(paths: Iterable[str]) -> bool:
    """Whether records go into object storage."""
    return any(map(is_url, paths))


def refuse_objects(**paths: str | None) -> None:
    """Raise BadUsage for a URL where a file has to be: one that is written little by little, or read again.

    Keywords are the options' names.
    """
    for option, path in paths.items():
        if path is not None and is_url(path):
            raise BadUsage(f"--{option} {path}: an object is written once, when it is whole; accepted: a file")


@dataclass(frozen=True, slots=True)
class EndedJob:
    """A job whose records are complete, and how they are read: the same bytes, whoever writes them, and when.

    They are those of the job's end, which Redis keeps in one order, so that of two writers, or of one that is started
    again, neither can leave other bytes than the other. An object is seen once the last of its parts is there, and
    says whose it is: whoever finds it done leaves it.
    """

    job: Followed
    status: JobStatus
    order: Literal["completion", "input"] = "completion"

    def write(self, paths: RecordPaths) -> FailureCounts:
        """Write the objects, unless they are there; returns the job's failures.

        Raises CommandError where the store or Redis do not have it, Interrupted on SIGINT and SIGTERM; nothing of an
        object is left then.
        """
        if not self.status.status.is_terminal:
            raise BadUsage(
                f"job {self.status.id} is {self.status.status.value}, and an object is written once, when it is whole; "
                "accepted: --follow, which waits for the job's end, or a file"
            )
        if self._is_written(paths):
            click.echo(f"{paths.output} has these records already: it is left as it is", err=True)
            return failures_of(self.job.client, self.status)
        for _ in range(MAX_READINGS):
            failures = FailureCounts()
            try:
                self._write_once(paths, failures)
            except _ChangedMeanwhile:
                continue
            return failures
        raise CommandError(f"Redis lost records of job {self.status.id} again and again; nothing is written")

    def _is_written(self, paths: RecordPaths) -> bool:
        try:
            return all(holds_object(object_url(path), self._identity(paths)) for path in paths)
        except StorageError as error:
            raise CommandError(str(error)) from error

    def _identity(self, paths: RecordPaths) -> Mapping[str, str]:
        """What tells an object of this job from any other that could have its name."""
        ended_us = round(1e6 * (self.status.finished_at or 0))
        kinds = "one" if paths.errors is None else "two"
        # No hyphens, which Azure refuses, and no _: nginx before a server drops headers that have one.
        return {"millracejob": self.status.id, "millracerecords": f"{self.order}-{kinds}-{ended_us}"}

    def _write_once(self, paths: RecordPaths, failures: FailureCounts) -> None:
        pages = self.job.client.pages(self.status.id, order=self.order)
        num_written = 0
        with (
            stop_signals(signal.SIGINT, signal.SIGTERM) as should_stop,
            shown(self.job),
            record_output(paths, identity=self._identity(paths)) as write,
        ):
            counted = failures.counting(write)
            for page in pages:
                for record in page:
                    counted(record)
                    num_written += 1
                if should_stop():
                    again = f"{self.job.command('results')}{_options(paths, self.order)}"
                    raise Interrupted(f"interrupted; nothing is written: {again} writes it")
            # Before the store makes objects of what it has: they must be what every other writer makes.
            now = self.job.client.status(self.status.id)
            is_same = (now.status, now.finished_at) == (self.status.status, self.status.finished_at)
            if pages.num_rewinds or not is_same or num_written != self.status.request_counts.finished:
                raise _ChangedMeanwhile


class _ChangedMeanwhile(Exception):
    """The job is not what it was when the reading began."""


def _options(paths: RecordPaths, order: str) -> str:
    options = "" if order == "completion" else f" --order {order}"
    errors = "" if paths.errors is None else f" --errors-file {shlex.quote(paths.errors)}"
    return f" --follow{options} -o {shlex.quote(paths.output)}{errors}"
