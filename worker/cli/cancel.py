"""`millrace cancel`: end a job early."""

from __future__ import annotations

import json

import click

from worker.cli.command_settings import load_producer_settings, producer_options
from worker.cli.job_client import job_client
from worker.cli.job_text import job_details
from worker.schemas import batch_object


@click.command("cancel")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: OpenAI's batch object, as far as it applies.")
@producer_options
def command(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Cancel a job. Finished records stay; a job that has already ended is left as it is."""
    effective = load_producer_settings(assignments, redis_url)
    with job_client(effective) as client:
        job = client.cancel(job_id)
    click.echo(json.dumps(batch_object(job)) if as_json else job_details(job))
