"""`millrace watch`: a job until it ends."""

from __future__ import annotations

import json

import click

from worker.cli.command_settings import load_producer_settings, producer_options
from worker.cli.follow_job import follow_job, require_completed
from worker.cli.job_client import job_client
from worker.cli.job_text import job_details
from worker.schemas import JobStatus, batch_object


@click.command("watch")
@click.argument("job_id", metavar="JOB")
@click.option("--json", "as_json", is_flag=True, help="Print a JSON line for each change: OpenAI's batch object.")
@producer_options
def command(job_id: str, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Follow a job until it ends. Exit 1 if it failed, expired or was cancelled.

    Progress goes to stderr: a bar on a terminal, elsewhere a line every ten seconds. Rates are those of the last 15
    seconds, of prompts whose record is written: long answers count when they end, and what is under way shows in the
    workers' metrics. Prefix hits are the share of all prompt tokens that were not computed again.
    """
    effective = load_producer_settings(assignments, redis_url)

    def print_json(job: JobStatus) -> None:
        click.echo(json.dumps(batch_object(job)))

    with job_client(effective) as client:
        if as_json:
            job = follow_job(client, job_id, print_json)
        else:
            job = follow_job(client, job_id, plain_lines=True)
            click.echo(job_details(job))
    require_completed(job)
