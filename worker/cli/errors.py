"""`millrace errors`: a job's failed records."""

from __future__ import annotations

import click

from worker.cli.command_settings import load_producer_settings, producer_options
from worker.cli.data_files import STANDARD
from worker.cli.job_client import job_client
from worker.cli.record_output import record_output, write_records
from worker.cli.record_paths import RecordPaths


@click.command("errors")
@click.argument("job_id", metavar="JOB")
@click.option("-o", "--output", "output_path", default=STANDARD, metavar="FILE", help="Where to; default stdout.")
@click.option("--json", "as_json", is_flag=True, expose_value=False, help="Records are JSON lines with or without it.")
@producer_options
def command(job_id: str, output_path: str, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Print the records of requests without an answer written so far: bad lines, engine faults, cancelled, expired."""
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.status(job_id)  # a job that is not there must not empty the output file
        with record_output(RecordPaths(output_path, None)) as write:
            write_records(client.errors(job_id), write)
        if job.error:
            click.echo(f"the job itself {job.status.value}: {job.error}", err=True)
