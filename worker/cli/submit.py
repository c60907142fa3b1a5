"""`millrace submit`: sends files to the queue as one job."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TypedDict, Unpack

import click

from settings import LimitSettings
from worker.cli.exit_codes import BadUsage
from worker.cli.files import (
    OUTPUT_HELP,
    STANDARD,
    RecordPaths,
    check_output,
    input_files,
    record_output,
    refuse_same_file,
    write_records,
)
from worker.cli.jobs import follow_job, job_client, require_completed
from worker.cli.options import (
    Duration,
    ignore_param_option,
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
from worker.schemas import DEFAULT_PRIORITY

COUNTED_LIMITS = 100  # a job that is too large is counted up to so many times its limit, to say how large it is


class Arguments(TypedDict):
    """What click passes to `submit`."""

    input_paths: tuple[str, ...]
    wait: bool
    output_path: str | None
    priority: int
    deadline: float | None  # seconds
    tenant: str
    metadata: tuple[str, ...]
    idempotency_key: str | None
    endpoint: str | None
    strict: bool
    ignored_params: tuple[str, ...]
    redis_url: str | None
    assignments: tuple[str, ...]


@click.command("submit")
@click.argument("input_paths", nargs=-1, required=True, metavar="FILE...")
@click.option("--wait", is_flag=True, help="Wait until the job has ended; exit 1 unless it completed.")
@click.option(
    "-o", "--output", "output_path", metavar="FILE",
    help=f"Write results as they arrive; implies --wait. {OUTPUT_HELP}",
)  # fmt: skip
@click.option(
    "--priority", type=click.IntRange(0, 9), default=DEFAULT_PRIORITY, show_default=True, help="0 runs first."
)
@click.option("--deadline", type=Duration(), help="Give up what is unfinished after this long, such as 30m.")
@click.option("--tenant", default="default", show_default=True, help="Whose job it is.")
@click.option("--metadata", "metadata", multiple=True, metavar="KEY=VALUE", help="A note on the job. Repeatable.")
@click.option("--idempotency-key", metavar="KEY", help="Submitting again with the same key is the first job.")
@click.option(
    "--endpoint",
    type=click.Choice([endpoint.value for endpoint in Endpoint]),
    help="The one that every line must name.",
)
@click.option("--strict", is_flag=True, help="One bad line fails the job before any runs; else it fails alone.")
@ignore_param_option
@producer_options
def submit(**arguments: Unpack[Arguments]) -> None:
    """Submit the request lines of each FILE, in this order, as one job and print its id.

    - is stdin, a pattern in quotes ('day-*.jsonl') all files of such a name, sorted. Gzip is unpacked, whatever its
    name. The id goes to stdout; with -o -, where stdout is the results', to stderr. Ctrl-C while waiting leaves the
    job running.
    """
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    output_path = arguments["output_path"]
    limits = effective.settings.limits
    ignored = read_ignored_params(arguments["ignored_params"], limits)
    files = input_files(arguments["input_paths"])
    if output_path is None:
        with job_client(effective) as client:
            job_id = _submit(client, arguments, files, ignored, limits)
            click.echo(job_id)
            if arguments["wait"]:
                require_completed(follow_job(client, job_id, plain_lines=True))
        return
    paths = RecordPaths.of(output_path)
    for path in paths:
        for file in files:
            refuse_same_file(path, other=file.name, role="input")
        check_output(path)  # a job whose results cannot be written is not worth submitting
    with job_client(effective) as client:
        job_id = _submit(client, arguments, files, ignored, limits)
        click.echo(job_id, err=output_path == STANDARD)
        # Only now, so that earlier results are not replaced unless the job is submitted.
        with record_output(paths) as write:
            write_records(client.results(job_id, follow=True), write)
        job = client.status(job_id)
        click.echo(counts_text(job), err=True)
        require_completed(job)


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
            strict=arguments["strict"],
        )
    except UnreadableInput as error:
        raise BadUsage(f"{error}; nothing was submitted") from error
    except JobTooLarge as error:
        again = ignored.strip(read_input_files(files, limits.max_prompt_bytes))
        raise _of_whole_files(error, again if all(map(_is_rereadable, files)) else ()) from error
    if ignored.text:
        click.echo(ignored.text, err=True)
    return job_id


def _is_rereadable(file: InputFile) -> bool:
    return file.is_complete and file.name != STANDARD


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
