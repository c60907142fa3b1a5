"""`millrace callbacks list`, `retry` and `drop`: what is to be told of jobs that have ended, and what could not be."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import UTC, datetime

import click
import redis

from settings import SettingsError
from settings.fields import mask_userinfo
from worker.cli.exit_codes import BadUsage, CommandError, printable
from worker.cli.jobs import shown_redis_url
from worker.cli.options import load_producer_settings, producer_options
from worker.registry.callbacks import CallbackEvent, CallbackOutbox
from worker.registry.connect import connect
from worker.registry.errors import CallbackUnknown
from worker.registry.keys import Keys

LISTED = 1000


@click.group("callbacks")
def callbacks() -> None:
    """List callbacks (on_done) that wait or were given up, send them again, or drop them."""


@callbacks.command("list")
@click.option("--dead", "only_dead", is_flag=True, help="Only those that were given up; they are kept for a week.")
@click.option("--limit", type=click.IntRange(1, 10_000), default=LISTED, show_default=True, help="Most of each kind.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects.")
@producer_options
def list_callbacks(
    only_dead: bool, limit: int, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]
) -> None:
    """List those that wait, the next to be sent first, then those that were given up: id, when, tries, whom, why."""
    with _outbox(assignments, redis_url) as outbox:
        found = outbox.events(limit, only_dead=only_dead)
    if as_json:
        click.echo(json.dumps([_object(event) for event in found]))
        return
    for event in found:
        click.echo(_row(event))


@callbacks.command("retry")
@click.argument("event_id", metavar="ID", required=False)
@click.option("--dead", "all_dead", is_flag=True, help="All that were given up.")
@producer_options
def retry(event_id: str | None, all_dead: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Have one sent now, with as many tries before it as a new one. ID is that of `list`; it stays the same."""
    if (event_id is None) == (not all_dead):
        raise BadUsage("accepted: an ID, or --dead for all that were given up")
    with _outbox(assignments, redis_url) as outbox:
        if event_id is not None:
            outbox.retry(event_id)
        num_sent = _retry_dead(outbox) if event_id is None else 1
    click.echo(f"{num_sent} to be sent", err=True)


def _retry_dead(outbox: CallbackOutbox) -> int:
    """How many there were. One that was dropped or forgotten since it was listed is none."""
    num_retried = 0
    for event in outbox.events(10_000, only_dead=True):
        with suppress(CallbackUnknown):
            outbox.retry(event.id)
            num_retried += 1
    return num_retried


@callbacks.command("drop")
@click.argument("event_id", metavar="ID")
@producer_options
def drop(event_id: str, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Forget one: it is not sent any more. ID is that of `list`."""
    with _outbox(assignments, redis_url) as outbox:
        outbox.drop(event_id)


def _object(event: CallbackEvent) -> dict[str, object]:
    return {
        "id": event.id,
        "job": event.job_id,
        "tenant": event.tenant,
        "on_done": event.target,
        "status": event.state,
        "created_at": event.created_at,
        "tries": event.tries,
        "error": event.error or None,
        "is_dead": event.is_dead,
        "dead_since" if event.is_dead else "next_try_at": round(event.due_at, 3),
    }


def _row(event: CallbackEvent) -> str:
    at = datetime.fromtimestamp(event.due_at, UTC).strftime("%Y-%m-%d %H:%M:%S")
    what = "dead since" if event.is_dead else "next"
    row = f"{event.id}  {what} {at}  {event.tries} tries  {mask_userinfo(event.target)}  {event.error}"
    return printable(row.rstrip())


@contextmanager
def _outbox(assignments: tuple[str, ...], redis_url: str | None) -> Iterator[CallbackOutbox]:
    effective = load_producer_settings(assignments, redis_url)
    try:
        with connect(effective.settings.redis) as client:
            yield CallbackOutbox(client, Keys())
    except CallbackUnknown as error:
        raise CommandError(str(error)) from error
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error
