"""`millrace jobs`: every job Redis knows."""

from __future__ import annotations

import json

import click

from worker.cli.command_settings import load_command_settings, redis_options
from worker.cli.job_client import job_client
from worker.cli.job_text import JOB_COLUMNS, job_row


@click.command("jobs")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of statuses.")
@redis_options
def command(as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """List jobs, newest first."""
    effective = load_command_settings(assignments, {"redis.url": redis_url})
    with job_client(effective) as client:
        jobs = client.jobs()
    if as_json:
        click.echo(json.dumps([job.model_dump(mode="json") for job in jobs]))
        return
    click.echo(JOB_COLUMNS)
    for job in jobs:
        click.echo(job_row(job))
