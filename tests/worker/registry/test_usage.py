"""What tenants have used is counted with each record, once, and outlives the job."""

from __future__ import annotations

import json
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner

from tests.support.registry import LINES, TestRegistry, ended_job, must_claim, ok, redis_time_s
from worker.cli.main import cli
from worker.registry.exchange import perform
from worker.registry.keys import UnitRef
from worker.registry.leases import PromptRecord
from worker.registry.lifecycle import Outcome, PutStatus
from worker.registry.usage import KEPT_DAYS, Usage, usage_since
from worker.schemas import SubmitOptions


def _used(registry: TestRegistry, num_days: int = 1) -> dict[tuple[str, str], Usage]:
    found = perform(registry.redis, usage_since(registry.keys, num_days))
    return {(entry.tenant, entry.model): entry.usage for entry in found}


@pytest.fixture(autouse=True)
def _not_at_midnight(registry: TestRegistry) -> None:
    """Wait until the day has a minute left: what is written is of one day, and is looked up by it."""
    left_s = 86_400 - redis_time_s(registry.redis) % 86_400
    if left_s < 60:
        time.sleep(left_s)


def _today(registry: TestRegistry) -> int:
    return int(redis_time_s(registry.redis)) // 86_400


def test_a_record_is_counted_once_and_outlives_the_job(registry: TestRegistry) -> None:
    job_id = registry.running_job([0, 1])
    leases = registry.leases()
    claim = must_claim(leases, UnitRef.shard(job_id, 0))
    leases.put(claim, [ok(0)])
    leases.put(claim, [ok(0)])  # a writer that lost the answer sends it again
    failed = PromptRecord(1, Outcome.ERROR, "{}", prompt_tokens=4, output_tokens=1)
    assert leases.put(claim, [failed])[0] is PutStatus.JOB_DONE
    assert leases.put(claim, [ok(1)])[0] is PutStatus.FENCED
    expected = {("default", "fake"): Usage(prompts=2, input_tokens=9, cached_tokens=2, output_tokens=4)}
    assert _used(registry) == expected
    registry.redis.delete(*registry.redis.keys("*:j:*"))
    assert _used(registry) == expected


def test_who_lost_the_lease_counts_nothing(registry: TestRegistry) -> None:
    leases = registry.leases()
    first = must_claim(leases, UnitRef.shard(registry.running_job([0]), 0))
    registry.lapse(first.ref)
    second = must_claim(leases, first.ref, alone=True)
    assert leases.put(first, [ok(0)])[0] is PutStatus.FENCED
    assert _used(registry) == {}
    leases.put(second, [ok(0)])
    assert _used(registry)["default", "fake"].prompts == 1


def test_tenants_and_days_are_apart_and_a_day_is_forgotten_in_time(registry: TestRegistry) -> None:
    ended_job(registry, {}, SubmitOptions(tenant="a"))
    today = _today(registry)
    registry.redis.hset(registry.keys.usage(today - 1), mapping={"n/b/m/x": 3, "i/b/m/x": 7})
    found = perform(registry.redis, usage_since(registry.keys, 2))
    assert [(entry.tenant, entry.model) for entry in found] == [("b", "m/x"), ("a", "")]
    assert found[0].usage == Usage(3, 7, 0, 0)
    assert (found[1].day - found[0].day).days == 1
    ttl_s = registry.redis.ttl(registry.keys.usage(today))
    assert (KEPT_DAYS - 1) * 86_400 - 5 <= ttl_s <= KEPT_DAYS * 86_400


def test_a_day_has_a_bounded_number_of_entries(registry: TestRegistry) -> None:
    full: dict[Any, Any] = {f"{kind}/t{number}/m": 1 for number in range(5000) for kind in "nico"}
    registry.redis.hset(registry.keys.usage(_today(registry)), mapping=full)
    for tenant in ("new", "newer", "t7"):
        ended_job(registry, {}, SubmitOptions(tenant=tenant))
    used = _used(registry)
    assert len(used) == 5001
    assert used["", ""].prompts == 3 * len(LINES)


def _run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(cli, ["usage", *arguments])
    return result.exit_code, result.output


PRICES = """
currency = "EUR"
[models.fake]
input = 1.0
cached = 0.1
output = 2.0
"""


def test_the_command_sums_by_what_is_asked_for_and_prices_it(
    registry: TestRegistry, redis_url: str, tmp_path: Path
) -> None:
    day = datetime.fromtimestamp(redis_time_s(registry.redis), UTC).date().isoformat()
    million: dict[Any, Any] = {
        "n/a/fake": 2,
        "i/a/fake": 3_000_000,
        "c/a/fake": 1_000_000,
        "o/a/fake": 500_000,
        "n/b/fake": 1,
    }
    registry.redis.hset(registry.keys.usage(_today(registry)), mapping=million)
    prices = tmp_path / "prices.toml"
    prices.write_text(PRICES)
    code, output = _run("--by", "day,tenant,model", "--prices", str(prices), "--json", "--redis-url", redis_url)
    assert code == 0
    first, second = map(json.loads, output.splitlines())
    assert first == {
        "day": day, "tenant": "a", "model": "fake", "prompts": 2, "input_tokens": 3_000_000,
        "cached_tokens": 1_000_000, "output_tokens": 500_000, "cost": 3.1, "currency": "EUR",
    }  # fmt: skip
    assert (second["tenant"], second["cost"]) == ("b", 0.0)
    table = _run("--by", "model", "--prices", str(prices), "--redis-url", redis_url)[1].splitlines()
    assert table[0].split() == ["MODEL", "PROMPTS", "IN", "CACHED", "OUT", "COST", "EUR"]
    assert table[1].split() == ["fake", "3", "3,000,000", "1,000,000", "500,000", "3.10"]
    assert table[-1].split()[0] == "total"
    only = _run("--tenant", "b", "--json", "--redis-url", redis_url)[1]
    assert json.loads(only)["prompts"] == 1


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (("--by", "tenant,colour"), "accepted: one or more of tenant, model, day"),
        (("--by", "day,day"), "accepted: one or more of"),
        (("--days", "0"), "1<=x<=400"),
    ],
)
def test_what_is_not_known_is_refused(redis_url: str, arguments: tuple[str, ...], told: str) -> None:
    code, output = _run(*arguments, "--redis-url", redis_url)
    assert code == 2
    assert told in output


@pytest.mark.parametrize(
    "text", ["models = 1", "[models.other]\ninput=1\noutput=1", "[models.fake]\ninput=-1\noutput=1", "="]
)
def test_a_file_of_prices_that_does_not_do_is_refused(
    registry: TestRegistry, redis_url: str, tmp_path: Path, text: str
) -> None:
    registry.redis.hset(registry.keys.usage(_today(registry)), mapping={"n/a/fake": 1, "i/a/fake": 5})
    prices = tmp_path / "prices.toml"
    prices.write_text(text)
    assert _run("--prices", str(prices), "--redis-url", redis_url)[0] == 2
