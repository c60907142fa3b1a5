"""`millrace status`, `watch`, `results`, `errors`, `cancel`, `retry`, `delete` and `jobs`: what became of jobs."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Literal, TypedDict, Unpack

import click
import redis

from settings import EffectiveSettings, SettingsError
from worker.cli.exit_codes import BadUsage, CommandError
from worker.cli.files import OUTPUT_HELP, STANDARD, RecordPaths, record_output, write_records
from worker.cli.options import Duration, load_producer_settings, producer_options
from worker.cli.progress import JOB_COLUMNS, JobProgress, job_details, job_row
from worker.client import BatchClient
from worker.registry.errors import InvalidJobId, InvalidSubmission, RegistryError
from worker.registry.jobs import ResultOrder
from worker.schemas import JobState, JobStatus, SubmitArguments, batch_object

POLL_S = 0.5


@click.command("status")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: OpenAI's batch object, as far as it applies.")
@producer_options
def status(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Show a job's state, counts and tokens. Exit 1 if it failed, expired or was cancelled."""
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.status(job_id)
    click.echo(json.dumps(batch_object(job)) if as_json else job_details(job))
    require_completed(job)


@click.command("watch")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each change: OpenAI's batch object.")
@producer_options
def watch(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Follow a job until it ends. Exit 1 if it failed, expired or was cancelled.

    Progress goes to stderr: a bar on a terminal, elsewhere a line every ten seconds. Rates are those of the last 15
    seconds, of prompts whose record is written: long answers count when they end, and what is under way shows in the
    workers' metrics. Prefix hits are the share of all prompt tokens that were not computed again.
    """
    effective = load_producer_settings(assignments, redis_url)

    def print_json(job: JobStatus) -> None:
        click.echo(json.dumps(batch_object(job)))

    with job_client(effective) as client:
        if as_json:
            job = follow_job(client, job_id, print_json)
        else:
            job = follow_job(client, job_id, plain_lines=True)
            click.echo(job_details(job))
    require_completed(job)


class Arguments(TypedDict):
    """What click passes to `results`."""

    job_id: str
    output_path: str
    errors_path: str | None
    order: Literal["completion", "input"]
    cursor: int
    follow: bool
    redis_url: str | None
    assignments: tuple[str, ...]


@click.command("results")
@click.argument("job_id", metavar="JOB")
@click.option("-o", "--output", "output_path", default=STANDARD, metavar="FILE", help=f"Default stdout. {OUTPUT_HELP}")
@click.option("--errors-file", "errors_path", metavar="FILE", help="Put records without an answer there.")
@click.option(
    "--order", type=click.Choice([order.value for order in ResultOrder]), default="completion", show_default=True,
    help="As the records were written, or as the lines stood; then without --follow it ends before a missing one.",
)  # fmt: skip
@click.option("--cursor", type=click.IntRange(min=0), default=0, metavar="N", help="Leave out the first N records.")
@click.option("--follow", is_flag=True, help="Go on until the job has ended; exit 1 unless it completed.")
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="Records are JSON lines with or without it.")
@producer_options
def results(**arguments: Unpack[Arguments]) -> None:
    """Print the records written so far, failed ones included."""
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    job_id, follow = arguments["job_id"], arguments["follow"]
    with job_client(effective) as client:
        client.status(job_id)  # a job that is not there must not empty the output file
        with record_output(RecordPaths.of(arguments["output_path"], arguments["errors_path"])) as write:
            write_records(client.results(job_id, arguments["cursor"], follow, order=arguments["order"]), write)
        if follow:
            require_completed(client.status(job_id))


@click.command("errors")
@click.argument("job_id", metavar="JOB")
@click.option("-o", "--output", "output_path", default=STANDARD, metavar="FILE", help="Where to; default stdout.")
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="Records are JSON lines with or without it.")
@producer_options
def errors(job_id: str, output_path: str, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Print the records of requests without an answer written so far: bad lines, engine faults, cancelled, expired."""
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.status(job_id)  # a job that is not there must not empty the output file
        with record_output(RecordPaths(output_path, None)) as write:
            write_records(client.errors(job_id), write)
        if job.error:
            click.echo(f"the job itself {job.status.value}: {job.error}", err=True)


@click.command("cancel")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: OpenAI's batch object, as far as it applies.")
@producer_options
def cancel(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Cancel a job. Finished records stay; a job that has already ended is left as it is."""
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.cancel(job_id)
    click.echo(json.dumps(batch_object(job)) if as_json else job_details(job))


@click.command("retry")
@click.argument("job_id", metavar="JOB")
@click.option("--wait", is_flag=True, help="Wait until the new job has ended; exit 1 unless it completed.")
@click.option("--priority", type=click.IntRange(0, 9), help="0 runs first; default: the first job's.")
@click.option("--deadline", type=Duration(), help="Give up after this long, such as 30m; default: as the first job.")
@producer_options
def retry(
    job_id: str,
    wait: bool,
    priority: int | None,
    deadline: float | None,
    redis_url: str | None,
    assignments: tuple[str, ...],
) -> None:
    """Submit the lines of a job that failed, or that it was cancelled or expired before, as a new job; print its id.

    The job must have ended. Tenant, metadata, endpoint and --strict are the first job's. A line without a custom_id
    keeps the line-N of the first job. Lines refused as duplicate_custom_id are left out. Lines that failed are kept
    as long as the job's results.
    """
    options: SubmitArguments = {}
    if priority is not None:
        options["priority"] = priority
    if deadline is not None:
        options["deadline_s"] = deadline
    with job_client(load_producer_settings(assignments, redis_url)) as client:
        retried_id = client.retry(job_id, **options)
        num_failed = client.status(job_id).request_counts.failed
        left_out = num_failed - client.status(retried_id).request_counts.total
        if left_out > 0:
            click.echo(f"{left_out} of {num_failed} lines left out: an earlier line has their custom_id", err=True)
        click.echo(retried_id)
        if wait:
            require_completed(follow_job(client, retried_id, plain_lines=True))


@click.command("delete")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI says that something is deleted.")
@producer_options
def delete(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Delete an ended job: its records, its lines that failed, its place in the list. There is no way back."""
    with job_client(load_producer_settings(assignments, redis_url)) as client:
        num_records = client.status(job_id).request_counts.finished
        client.delete(job_id)
    if as_json:
        click.echo(json.dumps({"id": job_id, "object": "batch", "deleted": True}))
    else:
        click.echo(f"deleted {job_id} and its {num_records} records")


@click.command("jobs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of OpenAI's batch objects.")
@producer_options
def jobs(as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """List jobs, newest first."""
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        jobs = client.jobs()
    if as_json:
        click.echo(json.dumps([batch_object(job) for job in jobs]))
        return
    click.echo(JOB_COLUMNS)
    for job in jobs:
        click.echo(job_row(job))


@contextmanager
def job_client(effective: EffectiveSettings) -> Iterator[BatchClient]:
    """A client for these settings' Redis; in the block a bad job id or job is BadUsage, other errors CommandError."""
    try:
        settings = effective.settings
        with BatchClient(settings.redis, limits=settings.limits, tracing=settings.tracing) as client:
            yield client
    except (InvalidJobId, InvalidSubmission, SettingsError) as error:
        raise BadUsage(str(error)) from error
    except RegistryError as error:
        raise CommandError(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error


def shown_redis_url(effective: EffectiveSettings) -> str:
    """`redis.url` with its password masked."""
    return next(row.value_text for row in effective.rows() if row.key == "redis.url")


def follow_job(
    client: BatchClient,
    job_id: str,
    on_change: Callable[[JobStatus], None] = lambda job: None,
    *,
    plain_lines: bool = False,
) -> JobStatus:
    """Poll until the job has ended, and show JobProgress on stderr; `on_change` gets each new status."""
    progress = JobProgress(sys.stderr, plain_lines=plain_lines)
    shown = None
    while True:
        job = client.status(job_id)
        progress.show(job)
        if job != shown:
            on_change(job)
            shown = job
        if job.status.is_terminal:
            return job
        time.sleep(POLL_S)


def require_completed(job: JobStatus) -> None:
    """Raise CommandError (exit 1) for a job that failed, expired or was cancelled."""
    if job.status.is_terminal and job.status is not JobState.COMPLETED:
        ended = "was cancelled" if job.status is JobState.CANCELLED else job.status.value
        reason = f": {job.error}" if job.error else ""
        raise CommandError(f"job {job.id} {ended}{reason}")
