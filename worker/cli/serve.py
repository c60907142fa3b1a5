"""`millrace serve`: OpenAI's Files and Batches API over HTTP, until it is told to stop."""

from __future__ import annotations

import logging
import signal

import click
import redis

from settings import SettingsError
from worker.cli.exit_codes import BadUsage, CommandError
from worker.cli.jobs import shown_redis_url
from worker.cli.options import load_command_settings, redis_options
from worker.serve.app import check_address, make_server

logger = logging.getLogger(__name__)


@click.command("serve")
@click.option("--host", metavar="ADDRESS", help="Address to serve on (serve.host).")
@click.option("--port", metavar="PORT", help="Port to serve on (serve.port).")
@redis_options
def serve(host: str | None, port: str | None, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Serve OpenAI's Files and Batches API: its clients need another base URL, http://HOST:PORT/v1, and a key.

    Without any key (`millrace keys create`) it serves this machine alone, as tenant `default`, and refuses another
    address. It keeps nothing itself: any number of servers may share one Redis. SIGTERM lets answers that are on their
    way end, for 30 s at most.
    """
    effective = load_command_settings(assignments, {"serve.host": host, "serve.port": port, "redis.url": redis_url})
    settings = effective.settings
    try:
        check_address(settings)
        server = make_server(settings)
    except SettingsError as error:
        raise BadUsage(str(error)) from error
    except redis.RedisError as error:
        raise CommandError(f"Redis at {shown_redis_url(effective)}: {error}") from error
    logger.info("serving", extra={"host": settings.serve.host, "port": settings.serve.port})
    # uvicorn stops on these by itself, and then sends itself the same signal once more.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda _number, _frame: None)
    try:
        server.run()
    except SystemExit as end:  # uvicorn has logged why: a port that another program has
        raise CommandError(f"could not serve on {settings.serve.host}:{settings.serve.port}") from end
