"""A client of the registry, whose refusals become command errors."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

import redis
from pydantic import ValidationError

from settings import EffectiveSettings, SettingsError
from worker.cli.bad_usage import BadUsage
from worker.cli.command_error import CommandError
from worker.client import BatchClient
from worker.registry.errors import InvalidJobId, InvalidSubmission, RegistryError


@contextmanager
def job_client(effective: EffectiveSettings) -> Iterator[BatchClient]:
    """A client for the Redis of these settings. Inside, a bad job id or job is BadUsage, anything else CommandError."""
    try:
        settings = effective.settings
        with BatchClient(settings.redis, limits=settings.limits, tracing=settings.tracing) as client:
            yield client
    except (InvalidJobId, InvalidSubmission, SettingsError) as error:
        raise BadUsage(str(error)) from error
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        name = ".".join(str(part) for part in first["loc"])
        raise BadUsage(f"{name}: {first['msg']}") from error
    except RegistryError as error:
        raise CommandError(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error


def shown_redis_url(effective: EffectiveSettings) -> str:
    """`redis.url` with its password masked."""
    return next(row.value_text for row in effective.rows() if row.key == "redis.url")
