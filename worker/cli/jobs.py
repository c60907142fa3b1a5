"""`millrace jobs`: every job Redis knows."""

from __future__ import annotations

import json

import click

from worker.cli.command_settings import load_producer_settings, producer_options
from worker.cli.job_client import job_client
from worker.cli.job_text import JOB_COLUMNS, job_row
from worker.schemas import batch_object


@click.command("jobs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of OpenAI's batch objects.")
@producer_options
def command(as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
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
