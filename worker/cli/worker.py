"""`millrace worker`: a Celery worker with an engine in it."""

from __future__ import annotations

import sys

import click
import redis

from engine.errors import CapabilityError, EngineError
from settings import EffectiveSettings, SettingsError
from worker.cli.bad_usage import BadUsage
from worker.cli.command_error import CommandError
from worker.cli.command_settings import load_command_settings, redis_options
from worker.cli.job_client import shown_redis_url
from worker.cli.stdout_to_stderr import stdout_to_stderr
from worker.process.worker_process import run_worker
from worker.requests.step_engine import StepEngine


@click.command("worker")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path).")
@click.option("--concurrency", metavar="N", help="Shards in flight at once (worker.concurrency).")
@redis_options
def command(model: str | None, concurrency: str | None, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Take jobs from Redis, run them on the model, write each result the moment it exists.

    SIGTERM finishes what it can within worker.drain_timeout_s and gives the rest back; SIGQUIT, or a second SIGINT,
    gives everything back at once. Exit code 70 if the engine broke: start another worker, its prompts are run again.
    """
    named = {"model.path": model, "worker.concurrency": concurrency, "redis.url": redis_url}
    effective = load_command_settings(assignments, named)
    try:
        with stdout_to_stderr():
            code = run_worker(effective, _load_engine)
    except (SettingsError, CapabilityError) as error:
        raise BadUsage(str(error)) from error
    except EngineError as error:
        raise CommandError(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error
    sys.exit(code)


def _load_engine(effective: EffectiveSettings) -> StepEngine:
    # Not above: with it comes torch, 2 to 5 s, and a wrong setting or a Redis that does not answer is said before.
    from engine.loading.load import load_engine  # noqa: PLC0415

    return load_engine(effective)
