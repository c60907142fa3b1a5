"""`millrace queue`: how many prompts wait for which model, for whoever starts and stops workers."""

from __future__ import annotations

import json
from dataclasses import asdict

import click
import redis

from settings import SettingsError
from worker.cli.exit_codes import BadUsage, CommandError, printable
from worker.cli.jobs import shown_redis_url
from worker.cli.options import load_producer_settings, producer_options
from worker.registry.backlog import backlog, totals
from worker.registry.connect import connect
from worker.registry.exchange import perform
from worker.registry.keys import Keys

COLUMNS = f"{'MODEL':<32} {'OPEN':>9} {'WAITING':>9} {'THEIR TOKENS':>13} {'OLDEST WAIT':>12}"


@click.command("queue")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: open_jobs, open_prompts, unread_units and models.")
@producer_options
def queue(as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Show by model how many prompts have no record, how many of these no worker has, and how long the oldest waits.

    Tokens, in and out, are estimated: as many a prompt as the job's with a record had, before these one for 4 bytes of
    its lines. No worker is needed, so an autoscaler can start from none. A job that names no model is counted under an
    empty name until a worker has planned it.
    """
    effective = load_producer_settings(assignments, redis_url)
    try:
        with connect(effective.settings.redis) as client:
            found, counts = perform(client, backlog(Keys())), perform(client, totals(Keys()))
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error
    if as_json:
        models = [asdict(model) for model in found.models]
        click.echo(json.dumps({**counts, "unread_units": found.num_unread_units, "models": models}))
        return
    click.echo(COLUMNS)
    for model in found.models:
        name = printable(model.model) or "(none named)"
        click.echo(
            f"{name:<32} {model.open_prompts:>9} {model.waiting_prompts:>9} "
            f"{model.waiting_tokens:>13} {model.oldest_wait_s:>10.0f} s"
        )
