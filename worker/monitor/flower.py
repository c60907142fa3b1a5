"""`millrace flower`: serves Flower, Celery's own page about the workers, with every control turned off."""

from __future__ import annotations

import logging
import signal
from pathlib import Path

import click
from celery.app.control import Control
from flower.app import Flower
from flower.options import options
from flower.urls import settings as tornado_settings

from settings import Settings, SettingsError
from worker.acl import UnusablePassword, generate_password, read_password
from worker.app import create_app
from worker.cli.exit_codes import BadUsage
from worker.cli.options import load_producer_settings, producer_options
from worker.registry.exchange import Untyped

# Of the page. Redis knows nothing of it.
PAGE_USER = "operator"
# A task is a shard of up to worker.shard_size prompts; Flower keeps about 2 kB of each.
_MAX_TASKS = 20_000


@click.command("flower")
@click.option("--address", default="127.0.0.1", show_default=True, metavar="HOST", help="Where the page is served.")
@click.option("--port", default=5555, show_default=True, type=click.IntRange(1, 65_535), metavar="N")
@click.option(
    "--password-file", required=True, metavar="FILE",
    help=f"Password of the page's user, {PAGE_USER}; made where there is no such file.",
)  # fmt: skip
@producer_options
def flower(address: str, port: int, password_file: str, redis_url: str | None, assignments: tuple[str, ...]) -> None:
    """Serve Flower, which shows the workers that send events (worker.send_events) and their tasks.

    It watches only: workers take no remote control, and its buttons are off. Its Redis user is millrace-flower.
    """
    settings = load_producer_settings(assignments, redis_url).settings
    try:
        generate_password(Path(password_file))
        run_flower(settings, address, port, read_password(Path(password_file)))
    except (SettingsError, UnusablePassword) as error:
        raise BadUsage(str(error)) from error


def run_flower(settings: Settings, address: str, port: int, page_password: str) -> None:
    """Serve http://address:port/ to those who know the password, until SIGTERM or SIGINT.

    /metrics (counts by worker and task) and /healthcheck need no password. It shows what workers have told it
    (`worker.send_events`) since it was started, and waits for a Redis that is away. Raises SettingsError for a Redis
    that may not be used, OSError for an address that cannot be had.
    """
    app = create_app(settings)
    app.control_cls = "worker.monitor.flower:SilentControl"
    app.conf.event_queue_expires = None  # a channel does not expire, and kombu would run scripts for it
    # Not Flower's own command, which would also read FLOWER_* and a flowerconfig.py in the working directory.
    options.address, options.port = address, port
    options.basic_auth = [f"{PAGE_USER}:{page_password}"]
    options.read_only = True  # no button, and its API refuses to stop, revoke or send
    options.enable_events = False  # workers are not told to send them: they do or they do not
    options.max_tasks = _MAX_TASKS
    logging.getLogger("flower.inspector").setLevel(logging.ERROR)  # it warns that no worker answers
    logging.getLogger("tornado.access").setLevel(logging.WARNING)  # what is refused, not what is served
    server = Flower(capp=app, options=options, **tornado_settings)
    server.start_http_server()

    def stop(*_: Untyped) -> None:
        server.io_loop.add_callback_from_signal(server.stop)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server.start()


class SilentControl(Control):  # type: ignore[misc]  # celery has no types
    """Sends none of the commands by which Flower asks workers who they are and tells them to send events.

    Workers do not listen (`worker_enable_remote_control`), and Flower's Redis user may not send.
    """

    def broadcast(self, command: str, *args: Untyped, **kwargs: Untyped) -> None:
        """Send nothing, which gets no answers."""
