"""Flower for Millrace's workers: it watches, and can do nothing."""

from __future__ import annotations

import logging
import signal

from flower.app import Flower
from flower.options import options
from flower.urls import settings as tornado_settings

from settings import Settings
from worker.app import create_app
from worker.broker.untyped import Untyped

# Of the page. Redis knows nothing of it.
PAGE_USER = "operator"
# A task is a shard of up to worker.shard_size prompts; Flower keeps about 2 kB of each.
_MAX_TASKS = 20_000


def run_flower(settings: Settings, address: str, port: int, page_password: str) -> None:
    """Serve http://address:port/ to whoever knows the password, until SIGTERM or SIGINT; /metrics (counts by worker and
    task) and /healthcheck to anybody.

    What it shows is what workers tell it (`worker.send_events`) since it was started. Raises SettingsError for a Redis
    that may not be used, OSError for an address that cannot be had; a Redis that is away is waited for.
    """
    app = create_app(settings)
    app.control_cls = "worker.monitor.silent_control:SilentControl"
    app.conf.event_queue_expires = None  # a channel does not expire, and what kombu does about it takes scripts
    # Not through Flower's own command: that would also listen to FLOWER_* and to a flowerconfig.py where it is started.
    options.address, options.port = address, port
    options.basic_auth = [f"{PAGE_USER}:{page_password}"]
    options.read_only = True  # no button, and its API refuses to stop, revoke or send
    options.enable_events = False  # workers are not told to send them: they do or they do not
    options.max_tasks = _MAX_TASKS
    logging.getLogger("flower.inspector").setLevel(logging.ERROR)  # it wonders why nobody answers
    logging.getLogger("tornado.access").setLevel(logging.WARNING)  # what is refused, not what is served
    server = Flower(capp=app, options=options, **tornado_settings)
    server.start_http_server()

    def stop(*_: Untyped) -> None:
        server.io_loop.add_callback_from_signal(server.stop)

    signal.signal(signal.SIGTERM, stop)
    signal.signal(signal.SIGINT, stop)
    server.start()
