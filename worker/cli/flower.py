"""`millrace flower`: Celery's own page about the workers."""

from __future__ import annotations

from pathlib import Path

import click

from settings import SettingsError
from worker.acl.errors import UnusablePassword
from worker.acl.password_file import generate_password, read_password
from worker.cli.bad_usage import BadUsage
from worker.cli.command_settings import load_producer_settings, producer_options

# This module is imported for `millrace flower` alone.
from worker.monitor.run_flower import PAGE_USER, run_flower


@click.command("flower")
@click.option("--address", default="127.0.0.1", show_default=True, metavar="HOST", help="Where the page is served.")
@click.option("--port", default=5555, show_default=True, type=click.IntRange(1, 65_535), metavar="N")
@click.option(
    "--password-file", required=True, metavar="FILE",
    help=f"Password of the page's user, {PAGE_USER}; made where there is no such file.",
)  # fmt: skip
@producer_options
def command(address: str, port: int, password_file: str, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Serve Flower, which shows the workers that send events (worker.send_events) and their tasks.

    It watches only: workers take no remote control, and its buttons are off. Its Redis user is millrace-flower.
    """
    settings = load_producer_settings(assignments, redis_url).settings
    try:
        generate_password(Path(password_file))
        run_flower(settings, address, port, read_password(Path(password_file)))
    except (SettingsError, UnusablePassword) as error:
        raise BadUsage(str(error)) from error
