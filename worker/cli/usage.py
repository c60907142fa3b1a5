"""`millrace usage`: what tenants have used of models, and what that costs."""

from __future__ import annotations

import json
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import click
import redis
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from settings import SettingsError
from worker.cli.exit_codes import BadUsage, CommandError, printable
from worker.cli.jobs import shown_redis_url
from worker.cli.options import load_producer_settings, producer_options
from worker.registry.connect import connect
from worker.registry.exchange import perform
from worker.registry.keys import Keys
from worker.registry.usage import KEPT_DAYS, DayUsage, Usage, usage_since

BY = ("tenant", "model", "day")
ANY_MODEL = "*"
MILLION = 1_000_000


class Price(BaseModel):
    """Of a million tokens."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    input: float = Field(ge=0, allow_inf_nan=False)
    cached: float | None = Field(default=None, ge=0, allow_inf_nan=False)  # None: as other input
    output: float = Field(ge=0, allow_inf_nan=False)

    def of(self, usage: Usage) -> float:
        """What it costs."""
        cached = self.input if self.cached is None else self.cached
        fresh_tokens = usage.input_tokens - usage.cached_tokens
        return (fresh_tokens * self.input + usage.cached_tokens * cached + usage.output_tokens * self.output) / MILLION


class Prices(BaseModel):
    """A file of prices."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    currency: str = ""
    models: dict[str, Price]  # `*`: of every other

    @classmethod
    def read(cls, path: Path) -> Prices:
        """The prices of a TOML file. Raises BadUsage for what is none."""
        try:
            return cls.model_validate(tomllib.loads(path.read_text()))
        except (OSError, ValueError) as error:
            told = error.errors()[0] if isinstance(error, ValidationError) else None
            place = "" if told is None else f"{'.'.join(map(str, told['loc']))}: {told['msg']}"
            raise BadUsage(
                f"--prices {path}: {place or error}; accepted: [models.NAME] with input, output and, if it differs, "
                "cached: prices of a million tokens"
            ) from error

    def of(self, found: DayUsage) -> float:
        """What it costs. Raises BadUsage for a model without a price."""
        price = self.models.get(found.model) or self.models.get(ANY_MODEL)
        if price is None and found.usage.input_tokens + found.usage.output_tokens == 0:
            return 0.0  # refused lines
        if price is None:
            raise BadUsage(f'--prices: no price for model {found.model!r}; accepted: [models."{ANY_MODEL}"] for others')
        return price.of(found.usage)


@dataclass(frozen=True, slots=True)
class Line:
    """A line of the table: what is summed under these names."""

    names: Sequence[str]  # in the order of --by
    usage: Usage
    cost: float


def summed(found: Sequence[DayUsage], by: Sequence[str], prices: Prices | None) -> list[Line]:
    """The sums, by name."""
    lines: dict[tuple[str, ...], Line] = {}
    for entry in found:
        all_names = {"tenant": entry.tenant, "model": entry.model, "day": entry.day.isoformat()}
        names = tuple(all_names[name] for name in by)
        before = lines.get(names, Line(names, Usage(), 0.0))
        cost = 0.0 if prices is None else prices.of(entry)
        lines[names] = Line(names, before.usage + entry.usage, before.cost + cost)
    return [lines[names] for names in sorted(lines)]


@click.command("usage")
@click.option("--by", default="tenant,model", show_default=True, metavar="NAMES", help="Of tenant, model and day.")
@click.option("--days", type=click.IntRange(1, KEPT_DAYS), default=30, show_default=True, help="How far back, in UTC.")
@click.option("--tenant", metavar="NAME", help="Of this tenant alone.")
@click.option(
    "--prices", "prices_file", metavar="FILE", type=click.Path(path_type=Path),
    help='TOML: [models."NAME"] with input, cached and output, prices of a million tokens; "*" is every other model.',
)  # fmt: skip
@click.option("--json", "as_json", is_flag=True, help="Print JSON, an object a line.")
@producer_options
def usage(
    by: str, days: int, tenant: str | None, prices_file: Path | None, as_json: bool, **connection: object
) -> None:
    """Show how many prompts and tokens tenants have used of models: in, of these cached, and out.

    It is counted with each record, and kept for 400 days, whatever becomes of the job. Prompts that failed are counted,
    too, with the tokens that they cost.
    """
    names = tuple(by.split(","))
    if len(set(names)) != len(names) or not set(names) <= set(BY):
        raise BadUsage(f"--by {by}: accepted: one or more of {', '.join(BY)}, separated by commas")
    prices = None if prices_file is None else Prices.read(prices_file)
    found = [entry for entry in _read(connection, days) if tenant in (None, entry.tenant)]
    lines = summed(found, names, prices)
    if as_json:
        for line in lines:
            cost = {} if prices is None else {"cost": round(line.cost, 6), "currency": prices.currency}
            click.echo(json.dumps({**dict(zip(names, line.names, strict=True)), **asdict(line.usage), **cost}))
        return
    for row in _table(names, lines, prices):
        click.echo(row)


def _read(connection: Mapping[str, object], days: int) -> list[DayUsage]:
    effective = load_producer_settings(connection["assignments"], connection["redis_url"])  # type: ignore[arg-type]
    try:
        with connect(effective.settings.redis) as client:
            return perform(client, usage_since(Keys(), days))
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error


def _table(names: Sequence[str], lines: Sequence[Line], prices: Prices | None) -> list[str]:
    """Its lines: as wide as the longest name."""
    total = Line(["total", *[""] * (len(names) - 1)], sum((line.usage for line in lines), Usage()), sum(
        line.cost for line in lines
    ))  # fmt: skip
    head = [*(name.upper() for name in names), "PROMPTS", "IN", "CACHED", "OUT"]
    rows = [head]
    for line in (*lines, total):
        counts = [f"{count:,}" for count in asdict(line.usage).values()]
        rows.append([*(printable(name) or "(none)" for name in line.names), *counts])
        if line is total:
            rows[-1][: len(names)] = line.names
    if prices is not None:
        head.append(f"COST {prices.currency}".strip())
        for row, line in zip(rows[1:], (*lines, total), strict=True):
            row.append(f"{line.cost:,.2f}")
    widths = [max(len(row[column]) for row in rows) for column in range(len(head))]
    return [
        "  ".join(
            cell.ljust(width) if column < len(names) else cell.rjust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]
