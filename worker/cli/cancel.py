"""`millrace cancel`: end a job early."""

from __future__ import annotations

import click

from worker.cli.command_settings import load_command_settings, redis_options
from worker.cli.job_client import job_client
from worker.cli.job_text import job_details


@click.command("cancel")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: the job's status.")
@redis_options
def command(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Cancel a job. Finished records stay; a job that has already ended is left as it is."""
    effective = load_command_settings(assignments, {"redis.url": redis_url})
    with job_client(effective) as client:
        job = client.cancel(job_id)
    click.echo(job.model_dump_json() if as_json else job_details(job))
