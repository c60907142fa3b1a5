"""`millrace demo`: the main job on this machine, from nothing to results."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import click

from worker.cli.command_error import CommandError
from worker.cli.install_hint import INSTALL_ENGINE
from worker.demo.demo_console import DemoConsole
from worker.demo.private_redis import NoRedisServer
from worker.demo.run_demo import DemoFailed, run_demo


@click.command("demo")
@click.option(
    "--dir", "directory", default=".demo", show_default=True, metavar="DIR", help="Where the demo keeps its logs."
)
def command(directory: str) -> None:
    """Start a private Redis and a worker, submit 300 support tickets, print progress, answers and how many are right,
    stop everything. Exit code 1 if fewer than 95 % are right.
    """
    if find_spec("torch") is None:  # the worker, a process of its own, would say so in its log
        raise CommandError(f"demo needs torch, which is not installed: {INSTALL_ENGINE}")
    try:
        run_demo(Path(directory), DemoConsole())
    except (DemoFailed, NoRedisServer) as error:
        raise CommandError(str(error)) from error
