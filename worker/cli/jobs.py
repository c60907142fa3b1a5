"""`millrace status`, `watch`, `results`, `errors`, `cancel`, `retry`, `delete` and `jobs`: what became of jobs."""

from __future__ import annotations

import json
import shlex
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, TypedDict, Unpack
from urllib.parse import urlsplit

import click
import redis

from settings import EffectiveSettings, SettingsError
from worker.cli.exit_codes import BadUsage, CommandError, printable
from worker.cli.failures import FailureCounts, MaxFailed, max_failed_option
from worker.cli.files import (
    OBJECT_HELP,
    OUTPUT_HELP,
    STANDARD,
    RecordPaths,
    check_output,
    local_name,
    record_output,
    write_records,
)
from worker.cli.follow import (
    Followed,
    Reading,
    failures_of,
    follow_job,
    follow_records,
    may_list_workers,
    require_completed,
    show_failures,
)
from worker.cli.objects import EndedJob, has_objects, refuse_objects
from worker.cli.options import Duration, as_local_name, complete_file, load_producer_settings, producer_options
from worker.cli.progress import JOB_COLUMNS, job_details, job_row
from worker.client import BatchClient
from worker.registry.errors import InvalidJobId, InvalidSubmission, RegistryError
from worker.registry.jobs import ResultOrder
from worker.schemas import JobFilter, JobState, JobStatus, SubmitArguments, batch_object

LISTED_JOBS = 1000


@click.command("status")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: OpenAI's batch object, as far as it applies.")
@max_failed_option
@producer_options
def status(
    job_id: str, as_json: bool, max_failed: MaxFailed | None, redis_url: str | None, assignments: tuple[str, ...]
) -> None:
    """Show a job's state, counts and tokens. Exit 1 if it failed, expired or was cancelled, or if all of it failed.

    JOB is a job's id, the beginning of one, or latest.
    """
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.status(client.find(job_id))
    click.echo(json.dumps(batch_object(job)) if as_json else job_details(job))
    require_completed(job, max_failed)


@click.command("watch")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each change: OpenAI's batch object.")
@max_failed_option
@producer_options
def watch(
    job_id: str, as_json: bool, max_failed: MaxFailed | None, redis_url: str | None, assignments: tuple[str, ...]
) -> None:
    """Follow a job until it ends. Exit 1 if it failed, expired or was cancelled, or if all of it failed.

    JOB is a job's id, the beginning of one, or latest.

    Progress goes to stderr: a bar on a terminal, elsewhere a line every ten seconds, and at the end the failed
    requests, summed up by error. Rates are those of the last 15 seconds, of prompts whose record is written: long
    answers count when they end, and what is under way shows in the workers' metrics. Prefix hits are the share of all
    prompt tokens that were not computed again. Ctrl-C leaves the job running, and watch may be started again.
    """
    effective = load_producer_settings(assignments, redis_url)

    def print_json(job: JobStatus) -> None:
        click.echo(json.dumps(batch_object(job)))

    with job_client(effective) as client:
        job = followed(client, effective, client.find(job_id), redis_url, plain_lines=not as_json)
        if as_json:
            end = follow_job(job, print_json)
        else:
            end = follow_job(job)
            click.echo(job_details(end))
            show_failures(job, end, failures_of(client, end))
    require_completed(end, max_failed)


class Arguments(TypedDict):
    """What click passes to `results`."""

    job_id: str
    output_path: str
    errors_path: str | None
    order: Literal["completion", "input"]
    cursor: str
    follow: bool
    max_failed: MaxFailed | None
    redis_url: str | None
    assignments: tuple[str, ...]


@click.command("results")
@click.argument("job_id", metavar="JOB")
@click.option(
    "-o", "--output", "output_path", default=STANDARD, metavar="FILE", shell_complete=complete_file,
    help=f"Default stdout; a file is replaced. {OUTPUT_HELP} {OBJECT_HELP}",
)  # fmt: skip
@click.option(
    "--errors-file", "errors_path", metavar="FILE", shell_complete=complete_file,
    help="Put records without an answer there.",
)  # fmt: skip
@click.option(
    "--order", type=click.Choice([order.value for order in ResultOrder]), default="completion", show_default=True,
    help="As the records were written, or as the lines stood; then without --follow it ends before a missing one.",
)  # fmt: skip
@click.option(
    "--cursor", default="0", metavar="CURSOR",
    help="Leave out the records that an interrupted reading wrote: its cursor as printed, or how many.",
)  # fmt: skip
@click.option("--follow", is_flag=True, help="Go on until the job has ended; exit 1 unless it completed.")
@max_failed_option
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="Records are JSON lines with or without it.")
@producer_options
def results(**arguments: Unpack[Arguments]) -> None:
    """Print the records written so far, failed ones included. JOB is a job's id, the beginning of one, or latest.

    With --follow and -o progress goes to stderr, and at the end the failed requests, summed up by error. Ctrl-C then
    leaves the job running and says how to get the other records.
    """
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    follow, cursor, order = arguments["follow"], arguments["cursor"], arguments["order"]
    if arguments["max_failed"] is not None and not follow:
        raise BadUsage("--max-failed: nothing waits for the job's end; accepted: with --follow")
    if cursor != "0" and has_objects([local_name(arguments["output_path"])]):
        raise BadUsage("--cursor: an object holds all records of a job; accepted: a file")
    with job_client(effective) as client:
        job_id = client.find(arguments["job_id"])
        _check_readable(client, job_id, cursor, order)
        paths = RecordPaths.of(arguments["output_path"], arguments["errors_path"])
        if has_objects(paths):
            _write_objects(client, effective, job_id, paths, arguments)
            return
        with record_output(paths) as write:
            if not follow:
                write_records(client.results(job_id, cursor, order=order), write)
                return
            failures = FailureCounts()
            job = followed(client, effective, job_id, arguments["redis_url"])
            end = follow_records(job, Reading(paths, failures.counting(write), cursor, order))
        show_failures(job, end, failures)
        require_completed(end, arguments["max_failed"])


def _write_objects(
    client: BatchClient, effective: EffectiveSettings, job_id: str, paths: RecordPaths, arguments: Arguments
) -> None:
    for path in paths:
        check_output(path)
    job = followed(client, effective, job_id, arguments["redis_url"])
    status = follow_job(job) if arguments["follow"] else client.status(job_id)
    failures = EndedJob(job, status, arguments["order"]).write(paths)
    if arguments["follow"]:
        show_failures(job, status, failures)
        require_completed(status, arguments["max_failed"])


def _check_readable(
    client: BatchClient, job_id: str, cursor: str = "0", order: Literal["completion", "input"] = "completion"
) -> None:
    """Read a page, since what cannot be read must not empty the output file."""
    try:
        next(client.pages(job_id, cursor, order=order))
    except ValueError as error:
        raise BadUsage(f"--{error}") from error


@click.command("errors")
@click.argument("job_id", metavar="JOB")
@click.option(
    "-o", "--output", "output_path", default=STANDARD, metavar="FILE", callback=as_local_name,
    shell_complete=complete_file, help="Where to; default stdout; a file is replaced.",
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="Records are JSON lines with or without it.")
@producer_options
def errors(job_id: str, output_path: str, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Print the records of requests without an answer written so far: bad lines, engine faults, cancelled, expired.

    JOB is a job's id, the beginning of one, or latest.
    """
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        refuse_objects(output=output_path)
        job = client.status(client.find(job_id))
        _check_readable(client, job.id)
        with record_output(RecordPaths(output_path, None)) as write:
            write_records(client.errors(job.id), write)
        if job.error:
            click.echo(f"the job itself {job.status.value}: {printable(job.error)}", err=True)


@click.command("cancel")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: OpenAI's batch object, as far as it applies.")
@producer_options
def cancel(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Cancel a job. Finished records stay; a job that has already ended is left as it is.

    JOB is a job's id, the beginning of one, or latest.
    """
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.cancel(client.find(job_id))
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
    as long as the job's results. JOB is a job's id, the beginning of one, or latest.
    """
    options: SubmitArguments = {}
    if priority is not None:
        options["priority"] = priority
    if deadline is not None:
        options["deadline_s"] = deadline
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        first_id = client.find(job_id)
        retried_id = client.retry(first_id, **options)
        num_failed = client.status(first_id).request_counts.failed
        left_out = num_failed - client.status(retried_id).request_counts.total
        if left_out > 0:
            click.echo(f"{left_out} of {num_failed} lines left out: an earlier line has their custom_id", err=True)
        click.echo(retried_id)
        if wait:
            job = followed(client, effective, retried_id, redis_url)
            end = follow_job(job)
            show_failures(job, end, failures_of(client, end))
            require_completed(end)


@click.command("delete")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON, as OpenAI says that something is deleted.")
@producer_options
def delete(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Delete an ended job: its records, its lines that failed, its place in the list. There is no way back.

    JOB is a job's id, the beginning of one, or latest.
    """
    with job_client(load_producer_settings(assignments, redis_url)) as client:
        deleted_id = client.find(job_id)
        num_records = client.status(deleted_id).request_counts.finished
        client.delete(deleted_id)
    if as_json:
        click.echo(json.dumps({"id": deleted_id, "object": "batch", "deleted": True}))
    else:
        click.echo(f"deleted {deleted_id} and its {num_records} records")


class ListArguments(TypedDict):
    """What click passes to `jobs`."""

    states: tuple[str, ...]
    tenant: str | None
    model: str | None
    age_s: float | None
    limit: int
    as_json: bool
    redis_url: str | None
    assignments: tuple[str, ...]


@click.command("jobs")
@click.option(
    "--state", "states", type=click.Choice([state.value for state in JobState]), multiple=True,
    help="Only jobs in this state. Repeatable.",
)  # fmt: skip
@click.option("--tenant", metavar="NAME", help="Only this tenant's.")
@click.option("--model", metavar="NAME", help="Only those of this model, as `status --json` names it.")
@click.option("--since", "age_s", type=Duration(), help="Only those submitted within this time, such as 2h or 1d.")
@click.option(
    "--limit", type=click.IntRange(min=1), default=LISTED_JOBS, show_default=True, metavar="N", help="The newest N."
)
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of OpenAI's batch objects.")
@producer_options
def jobs(**arguments: Unpack[ListArguments]) -> None:
    """List jobs, newest first."""
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    age_s = arguments["age_s"]
    wanted = JobFilter(
        states=tuple(map(JobState, arguments["states"])),
        tenant=arguments["tenant"],
        model=arguments["model"],
        since=None if age_s is None else time.time() - age_s,
    )
    with job_client(effective) as client:
        found = client.jobs(arguments["limit"], wanted)
    if arguments["as_json"]:
        click.echo(json.dumps([batch_object(job) for job in found]))
        return
    click.echo(JOB_COLUMNS)
    for job in found:
        click.echo(job_row(job))


@contextmanager
def job_client(effective: EffectiveSettings) -> Iterator[BatchClient]:
    """A client for these settings' Redis; in the block a bad job id or job is BadUsage, other errors CommandError."""
    try:
        settings = effective.settings
        with BatchClient(settings.redis, limits=settings.limits, tracing=settings.tracing) as client:
            yield client
    except (InvalidJobId, InvalidSubmission, SettingsError) as error:
        raise BadUsage(printable(str(error))) from error
    except RegistryError as error:
        raise CommandError(printable(str(error))) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error


def shown_redis_url(effective: EffectiveSettings) -> str:
    """`redis.url` with its password masked."""
    return next(row.value_text for row in effective.rows() if row.key == "redis.url")


def followed(
    client: BatchClient, effective: EffectiveSettings, job_id: str, redis_url: str | None, *, plain_lines: bool = True
) -> Followed:
    """The job to wait for; `redis_url`: the command's option, which commands about the job need too.

    One with a password is not repeated: whoever is told the command knows it.
    """
    has_option = redis_url is not None and urlsplit(redis_url).password is None
    options = f" --redis-url {shlex.quote(redis_url)}" if redis_url is not None and has_option else ""
    sees_workers = may_list_workers(effective.settings.redis)
    return Followed(client, job_id, sees_workers, plain_lines, options)
