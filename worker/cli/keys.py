"""`millrace keys create`, `list` and `revoke`: who may use `millrace serve`."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from datetime import UTC, datetime

import click
import redis

from settings import SettingsError
from worker.cli.exit_codes import BadUsage, CommandError, printable
from worker.cli.jobs import shown_redis_url
from worker.cli.options import load_producer_settings, producer_options
from worker.registry.api_keys import ApiKeys, KeyEntry
from worker.registry.connect import connect
from worker.registry.errors import KeyUnknown
from worker.registry.keys import Keys
from worker.schemas import SubmitOptions

MAX_NAME = 64

_TENANT = re.compile(r"[A-Za-z0-9._-]{1,64}")  # as SubmitOptions has it


@click.group("keys")
def keys() -> None:
    """Create, list and revoke the keys of `millrace serve`. Redis holds their digests alone."""


@keys.command("create")
@click.option("--tenant", metavar="NAME", help="Whose files and jobs the key sees, and no others.")
@click.option("--metrics", "is_for_metrics", is_flag=True, help="A key that reads /metrics and nothing else.")
@click.option("--name", default="", metavar="TEXT", help="A note on who has it, for `list`.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON.")
@producer_options
def create(
    tenant: str | None,
    is_for_metrics: bool,
    name: str,
    as_json: bool,
    redis_url: str | None,
    assignments: tuple[str, ...],
) -> None:
    """Print a new key, which can be shown this once."""
    if (tenant is None) == (not is_for_metrics):
        raise BadUsage("accepted: one of --tenant NAME and --metrics")
    if tenant is not None and _TENANT.fullmatch(tenant) is None:
        raise BadUsage(f"--tenant {tenant}: accepted: {SubmitOptions.accepted('tenant')}")
    if len(name) > MAX_NAME:
        raise BadUsage(f"--name has {len(name)} characters; accepted: at most {MAX_NAME}")
    with _api_keys(assignments, redis_url) as api_keys:
        entry, key = api_keys.create(tenant, name)
    click.echo(json.dumps({"key": key, **asdict(entry)}) if as_json else key)


@keys.command("list")
@click.option("--tenant", metavar="NAME", help="Those of this tenant alone.")
@click.option("--json", "as_json", is_flag=True, help="Print JSON: a list of objects.")
@producer_options
def list_keys(tenant: str | None, as_json: bool, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """List the keys by their ids: what they may do, since when, and the note."""
    with _api_keys(assignments, redis_url) as api_keys:
        found = [key for key in api_keys.all() if tenant in (None, key.tenant)]
    if as_json:
        click.echo(json.dumps([asdict(key) for key in found]))
        return
    for key in found:
        click.echo(_row(key))


@keys.command("revoke")
@click.argument("key_id", metavar="[ID]", required=False)
@click.option("--tenant", metavar="NAME", help="In place of an ID: every key of this tenant.")
@producer_options
def revoke(key_id: str | None, tenant: str | None, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Forget a key; the next request with it is refused. ID is that of `list`."""
    if (key_id is None) == (tenant is None):
        raise BadUsage("accepted: one of ID and --tenant NAME")
    with _api_keys(assignments, redis_url) as api_keys:
        try:
            revoked = [api_keys.revoke(key_id)] if key_id is not None else api_keys.revoke_all_of(tenant or "")
        except KeyUnknown as error:
            raise CommandError(str(error)) from error
    if not revoked:
        raise CommandError(f"tenant {tenant} has no key")
    for entry in revoked:
        click.echo(f"revoked {_row(entry)}", err=True)


def _row(key: KeyEntry) -> str:
    created = datetime.fromtimestamp(key.created_at, UTC).strftime("%Y-%m-%d %H:%M")
    whose = "metrics" if key.tenant is None else f"tenant {key.tenant}"
    return printable(f"{key.id}  {created}  {whose}  {key.name}".rstrip())


@contextmanager
def _api_keys(assignments: tuple[str, ...], redis_url: str | None) -> Iterator[ApiKeys]:
    effective = load_producer_settings(assignments, redis_url)
    try:
        with connect(effective.settings.redis) as client:
            yield ApiKeys(client, Keys())
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error
