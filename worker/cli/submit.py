"""`millrace submit`: a file to the queue."""

from __future__ import annotations

from typing import TypedDict, Unpack

import click

from worker.cli.command_settings import load_producer_settings, producer_options
from worker.cli.data_files import STANDARD, open_input, open_output, refuse_same_file
from worker.cli.duration import Duration
from worker.cli.follow_job import follow_job, require_completed
from worker.cli.job_client import job_client
from worker.cli.metadata import parse_metadata
from worker.cli.record_output import write_records
from worker.client import BatchClient
from worker.lines.read_raw_lines import read_raw_lines
from worker.schemas import DEFAULT_PRIORITY


class Arguments(TypedDict):
    """What click hands to the command."""

    input_path: str
    wait: bool
    output_path: str | None
    priority: int
    deadline: float | None  # seconds
    tenant: str
    metadata: tuple[str, ...]
    idempotency_key: str | None
    redis_url: str | None
    assignments: tuple[str, ...]


@click.command("submit")
@click.argument("input_path", metavar="FILE")
@click.option("--wait", is_flag=True, help="Wait until the job has ended; exit 1 unless it completed.")
@click.option("-o", "--output", "output_path", metavar="FILE", help="Write results as they arrive; implies --wait.")
@click.option(
    "--priority", type=click.IntRange(0, 9), default=DEFAULT_PRIORITY, show_default=True, help="0 runs first."
)
@click.option("--deadline", type=Duration(), help="Give up what is unfinished after this long, such as 30m.")
@click.option("--tenant", default="default", show_default=True, help="Whose job it is.")
@click.option("--metadata", "metadata", multiple=True, metavar="KEY=VALUE", help="A note on the job. Repeatable.")
@click.option("--idempotency-key", metavar="KEY", help="Submitting again with the same key is the first job.")
@producer_options
def command(**arguments: Unpack[Arguments]) -> None:
    """Submit the request lines of FILE (- is stdin) as one job and print its id.

    The id goes to stdout; with -o -, where stdout is the results', to stderr. Ctrl-C while waiting leaves the job
    running.
    """
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    output_path = arguments["output_path"]
    max_line_bytes = effective.settings.limits.max_prompt_bytes
    if output_path is None:
        with job_client(effective) as client:
            job_id = _submit(client, arguments, max_line_bytes)
            click.echo(job_id)
            if arguments["wait"]:
                require_completed(follow_job(client, job_id))
        return
    refuse_same_file(output_path, other=arguments["input_path"], role="input")
    # The output is opened first: a job whose results cannot be written is not worth submitting.
    with open_output(output_path) as target, job_client(effective) as client:
        job_id = _submit(client, arguments, max_line_bytes)
        click.echo(job_id, err=output_path == STANDARD)
        write_records(client.results(job_id, follow=True), target)
        require_completed(client.status(job_id))


def _submit(client: BatchClient, arguments: Arguments, max_line_bytes: int) -> str:
    metadata = parse_metadata(arguments["metadata"])
    with open_input(arguments["input_path"]) as source:
        return client.submit(
            read_raw_lines(source, max_line_bytes),
            priority=arguments["priority"],
            deadline_s=arguments["deadline"],
            tenant=arguments["tenant"],
            metadata=metadata,
            idempotency_key=arguments["idempotency_key"],
        )
