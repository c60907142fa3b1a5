"""`millrace submit`: sends files to the queue as one job."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import click

from settings import EffectiveSettings, LimitSettings
from worker.cli.exit_codes import BadUsage
from worker.cli.failures import FailureCounts, MaxFailed, max_failed_option
from worker.cli.files import (
    OBJECT_HELP,
    OUTPUT_HELP,
    STANDARD,
    RecordPaths,
    can_be_read_again,
    check_output,
    input_files,
    record_output,
    refuse_same_file,
)
from worker.cli.follow import Reading, failures_of, follow_job, follow_records, require_completed, show_failures
from worker.cli.jobs import followed, job_client
from worker.cli.objects import EndedJob, has_objects
from worker.cli.options import (
    Duration,
    complete_file,
    ignore_param_option,
    input_options,
    load_producer_settings,
    parse_metadata,
    producer_options,
    read_ignored_params,
)
from worker.cli.progress import counts_text
from worker.client import BatchClient
from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile, read_input_files
from worker.lines.ignored import IgnoredParams
from worker.lines.request_line import Endpoint
from worker.registry.errors import JobTooLarge
from worker.schemas import DEFAULT_PRIORITY, JobStatus, batch_object

COUNTED_LIMITS = 100  # a job that is too large is counted up to so many times its limit, to say how large it is


class Arguments(TypedDict):
    """What click passes to `submit`."""

    input_paths: tuple[str, ...]
    wait: bool
    output_path: str | None
    max_failed: MaxFailed | None
    as_json: bool
    priority: int
    deadline: float | None  # seconds
    tenant: str
    metadata: tuple[str, ...]
    idempotency_key: str | None
    endpoint: str | None
    model: str | None
    strict: bool
    on_done: str | None
    ignored_params: tuple[str, ...]
    redis_url: str | None
    assignments: tuple[str, ...]


@click.command("submit")
@input_options
@click.option("--wait", is_flag=True, help="Wait until the job has ended; exit 1 unless it completed.")
@click.option(
    "-o", "--output", "output_path", metavar="FILE", shell_complete=complete_file,
    help=f"Write results as they arrive, in place of what the file holds; implies --wait. {OUTPUT_HELP} {OBJECT_HELP}",
)  # fmt: skip
@max_failed_option
@click.option(
    "--json", "as_json", is_flag=True,
    help="Print OpenAI's batch object in place of the id; with --wait, at the end. With -o - to stderr.",
)  # fmt: skip
@click.option(
    "--priority", type=click.IntRange(0, 9), default=DEFAULT_PRIORITY, show_default=True, help="0 runs first."
)
@click.option("--deadline", type=Duration(), help="Give up what is unfinished after this long, such as 30m.")
@click.option("--tenant", default="default", show_default=True, help="Whose job it is.")
@click.option("--metadata", "metadata", multiple=True, metavar="KEY=VALUE", help="A note on the job. Repeatable.")
@click.option("--idempotency-key", metavar="KEY", help="The same lines submitted again with the key are the first job.")
@click.option(
    "--endpoint",
    type=click.Choice([endpoint.value for endpoint in Endpoint]),
    help="The one that every line must name.",
)
@click.option(
    "--model", metavar="NAME", help="The model of lines that name none; default: the only one that is served."
)
@click.option("--strict", is_flag=True, help="One bad line fails the job before any runs; else it fails alone.")
@click.option(
    "--on-done", metavar="TARGET",
    help="Whom to tell when the job has ended: a URL (limits.callback_hosts), or task:NAME@QUEUE, a Celery task.",
)  # fmt: skip
@ignore_param_option
@producer_options
def submit(**arguments: Unpack[Arguments]) -> None:
    """Submit the request lines of each FILE, in this order, as one job and print its id.

    - is stdin, a pattern in quotes ('day-*.jsonl') all files of such a name, sorted. Gzip is unpacked, whatever its
    name. The id goes to stdout; with -o -, where stdout is the results', and with --json --wait to stderr. While it
    waits, progress goes to stderr, and at the end the failed requests, summed up by error. Ctrl-C then leaves the job
    running and says how to come back to it.
    """
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    output_path = arguments["output_path"]
    waits = arguments["wait"] or output_path is not None
    if arguments["max_failed"] is not None and not waits:
        raise BadUsage("--max-failed: nothing waits for the job's end; accepted: with --wait or -o")
    limits = effective.settings.limits
    ignored = read_ignored_params(arguments["ignored_params"], limits)
    files = input_files(arguments["input_paths"])
    paths = None if output_path is None else RecordPaths.of(output_path)
    for path in paths or ():
        for file in files:
            refuse_same_file(path, other=file.name, role="input")
        check_output(path)  # a job whose results cannot be written is not worth submitting
    with job_client(effective) as client:
        job_id = _submit(client, arguments, files, ignored, limits)
        as_json, to_stderr = arguments["as_json"], output_path == STANDARD
        if waits or not as_json:
            click.echo(job_id, err=to_stderr or as_json)
        job = _wait(client, effective, arguments, job_id, paths) if waits else None
        if as_json:
            click.echo(json.dumps(batch_object(job or client.status(job_id))), err=to_stderr)
        if job is not None:
            require_completed(job, arguments["max_failed"])


def _wait(
    client: BatchClient, effective: EffectiveSettings, arguments: Arguments, job_id: str, paths: RecordPaths | None
) -> JobStatus:
    """The job once it has ended, its records written if there are paths, its failures summed up."""
    job = followed(client, effective, job_id, arguments["redis_url"])
    if paths is None:
        status = follow_job(job)
        show_failures(job, status, failures_of(client, status))
        return status
    if has_objects(paths):
        status = follow_job(job)
        failures = EndedJob(job, status).write(paths)
        click.echo(counts_text(status), err=True)
        show_failures(job, status, failures)
        return status
    failures = FailureCounts()
    # Only now, so that earlier results are not replaced unless the job is submitted.
    with record_output(paths) as write:
        status = follow_records(job, Reading(paths, failures.counting(write)))
    click.echo(counts_text(status), err=True)
    show_failures(job, status, failures)
    return status


def _submit(
    client: BatchClient, arguments: Arguments, files: Sequence[InputFile], ignored: IgnoredParams, limits: LimitSettings
) -> str:
    metadata = parse_metadata(arguments["metadata"])
    lines = ignored.strip(read_input_files(files, limits.max_prompt_bytes))
    try:
        job_id = client.submit(
            lines,
            priority=arguments["priority"],
            deadline_s=arguments["deadline"],
            tenant=arguments["tenant"],
            metadata=metadata,
            idempotency_key=arguments["idempotency_key"],
            endpoint=arguments["endpoint"],
            model=arguments["model"],
            strict=arguments["strict"],
            on_done=arguments["on_done"],
        )
    except UnreadableInput as error:
        raise BadUsage(f"{error}; nothing was submitted") from error
    except JobTooLarge as error:
        again = ignored.strip(read_input_files(files, limits.max_prompt_bytes))
        raise _of_whole_files(error, again if all(map(can_be_read_again, files)) else ()) from error
    if ignored.text:
        click.echo(ignored.text, err=True)
    return job_id


def _of_whole_files(refusal: JobTooLarge, lines: Iterable[bytes]) -> JobTooLarge:
    """The refusal with the size of all `lines`; as it is where there are none, or reading them breaks off."""
    size, most = 0, COUNTED_LIMITS * refusal.limit
    try:
        for line in lines:
            size += 1 if refusal.resource == "prompts" else len(line)
            if size >= most:
                return JobTooLarge(refusal.resource, size, refusal.limit, is_whole=False)
    except UnreadableInput:
        return refusal
    return JobTooLarge(refusal.resource, size, refusal.limit) if size else refusal
