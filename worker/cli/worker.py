"""`millrace worker`: runs a Celery worker with an engine in it, and keeps the output of libraries off stdout."""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

import click
import redis

from settings import EffectiveSettings
from worker.celery_worker import run_worker
from worker.cli.exit_codes import CommandError, refusals_in_a_line
from worker.cli.jobs import shown_redis_url
from worker.cli.options import load_command_settings, redis_options
from worker.requests.step_engine import StepEngine


@click.command("worker")
@click.option("--model", metavar="DIR", help="Checkpoint directory (model.path).")
@click.option("--concurrency", metavar="N", help="Shards in flight at once (worker.concurrency).")
@redis_options
def worker(model: str | None, concurrency: str | None, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Take jobs from Redis, run them on the model, write each result the moment it exists.

    SIGTERM finishes what it can within worker.drain_timeout_s and gives the rest back; SIGQUIT, or a second SIGINT,
    gives everything back at once. Exit code 70 if the engine broke: start another worker, its prompts are run again.
    """
    named = {"model.path": model, "worker.concurrency": concurrency, "redis.url": redis_url}
    effective = load_command_settings(assignments, named)
    try:
        with refusals_in_a_line(), stdout_to_stderr():
            code = run_worker(effective, _load_engine)
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error
    sys.exit(code)


def _load_engine(effective: EffectiveSettings) -> StepEngine:
    # Not at the top: torch comes with it (2 to 5 s), and a wrong setting or an absent Redis is reported before that.
    from engine.loading.load import load_engine  # noqa: PLC0415

    return load_engine(effective)


@contextmanager
def stdout_to_stderr() -> Iterator[None]:
    """Send what is written to standard output to standard error: stdout is for data.

    By descriptor, not by `sys.stdout`: Celery writes `worker: Warm shutdown (MainProcess)` with os.write from a signal
    handler, and libraries in C use the descriptor too.
    """
    if sys.__stdout__ is None or sys.__stderr__ is None:  # started without one of them
        yield
        return
    stdout, stderr = sys.__stdout__.fileno(), sys.__stderr__.fileno()
    sys.__stdout__.flush()
    kept = os.dup(stdout)
    os.dup2(stderr, stdout)
    try:
        yield
    finally:
        sys.__stdout__.flush()
        os.dup2(kept, stdout)
        os.close(kept)
