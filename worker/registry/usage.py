"""Reads what tenants have used of models, by day: kept for 400 days, so beyond the life of a job and its results.

The script that writes a record counts it, once, under the same fence (count_usage in scripts/prelude.lua). Days are
UTC's, by Redis' clock; a day is forgotten as a whole. Beyond 5000 pairs of tenant and model in a day, further ones are
counted together under empty names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import UTC, date, datetime, timedelta

from worker.registry.exchange import Exchange, text_fields
from worker.registry.keys import Keys

KEPT_DAYS = 400
CHUNK_DAYS = 20  # read together: a full day has 20,000 fields
_DAY_0 = date(1970, 1, 1)


@dataclass(frozen=True, slots=True)
class Usage:
    """What was used: prompts that have their record, those without an answer among them, and their tokens."""

    prompts: int = 0
    input_tokens: int = 0
    cached_tokens: int = 0  # of input_tokens: their KV came from the prefix cache
    output_tokens: int = 0

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            self.prompts + other.prompts,
            self.input_tokens + other.input_tokens,
            self.cached_tokens + other.cached_tokens,
            self.output_tokens + other.output_tokens,
        )


@dataclass(frozen=True, slots=True)
class DayUsage:
    """What a tenant used of a model on a day."""

    day: date
    tenant: str
    model: str  # "": of prompts that failed before it was known which they were for
    usage: Usage


def usage_since(keys: Keys, num_days: int) -> Exchange[list[DayUsage]]:
    """The last `num_days` days, today included, the oldest first."""
    [(now_s, _)] = yield [("TIME",)]
    today = datetime.fromtimestamp(int(now_s), UTC).date()
    days = [today - timedelta(days=back) for back in reversed(range(min(num_days, KEPT_DAYS)))]
    found: list[DayUsage] = []
    for start in range(0, len(days), CHUNK_DAYS):
        chunk = days[start : start + CHUNK_DAYS]
        answers = yield [("HGETALL", keys.usage((day - _DAY_0).days)) for day in chunk]
        for day, answer in zip(chunk, answers, strict=True):
            found += _of_day(day, text_fields(answer))
    return found


def _of_day(day: date, fields: Mapping[str, str]) -> Iterator[DayUsage]:
    for field, prompts in sorted(fields.items()):
        kind, tenant, model = field.split("/", 2)
        if kind == "n":
            counts = [int(fields.get(f"{other}/{tenant}/{model}", 0)) for other in "ico"]
            yield DayUsage(day, tenant, model, Usage(int(prompts), *counts))
