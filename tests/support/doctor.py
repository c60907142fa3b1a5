"""What `millrace doctor` finds at a Redis, and a Redis set up badly."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis

from settings import RedisSettings
from worker.doctor.redis import redis_findings
from worker.doctor.redis_facts import RedisFacts, connect_once
from worker.doctor.report import Finding


def redis_settings(url: str, **options: object) -> RedisSettings:
    return RedisSettings.model_validate({"url": url, **options}, strict=False)


def found_at(url: str, *, for_worker: bool = False, **options: object) -> dict[str, Finding]:
    """Findings by check, where each check has one."""
    findings = list(redis_findings(redis_settings(url, **options), url, for_worker=for_worker))
    by_check = {finding.check: finding for finding in findings}
    assert len(by_check) == len(findings), findings
    return by_check


def facts_at(url: str) -> RedisFacts:
    with connect_once(redis_settings(url)) as client:
        return RedisFacts.ask(client, redis_settings(url))


@contextmanager
def configured(url: str, **values: str) -> Iterator[redis.Redis]:
    """The server at `url` with these settings (`_` for `-`), which are then put back."""
    with redis.Redis.from_url(url, decode_responses=True) as client:
        names = {name.replace("_", "-"): value for name, value in values.items()}
        before = {name: client.config_get(name)[name] for name in names}
        try:
            for name, value in names.items():
                client.config_set(name, value)
            yield client
        finally:
            for name, value in reversed(before.items()):
                client.config_set(name, value)
