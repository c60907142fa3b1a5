"""`millrace results`: a job's records."""

from __future__ import annotations

from typing import Literal, TypedDict, Unpack

import click

from worker.cli.command_settings import load_producer_settings, producer_options
from worker.cli.data_files import STANDARD
from worker.cli.follow_job import require_completed
from worker.cli.job_client import job_client
from worker.cli.record_output import record_output, write_records
from worker.cli.record_paths import OUTPUT_HELP, RecordPaths
from worker.registry.result_order import ResultOrder


class Arguments(TypedDict):
    """What click hands to the command."""

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
def command(**arguments: Unpack[Arguments]) -> None:
    """Print the records written so far, failed ones included."""
    effective = load_producer_settings(arguments["assignments"], arguments["redis_url"])
    job_id, follow = arguments["job_id"], arguments["follow"]
    with job_client(effective) as client:
        client.status(job_id)  # a job that is not there must not empty the output file
        with record_output(RecordPaths.of(arguments["output_path"], arguments["errors_path"])) as write:
            write_records(client.results(job_id, arguments["cursor"], follow, order=arguments["order"]), write)
        if follow:
            require_completed(client.status(job_id))
