"""`millrace demo`: the main job on this machine, from nothing to results."""

from __future__ import annotations

from pathlib import Path

import click

from worker.cli.command_error import CommandError

# This module is imported for `millrace demo` alone, so it may import torch.
from worker.demo.demo_console import DemoConsole
from worker.demo.private_redis import NoRedisServer
from worker.demo.run_demo import DemoFailed, run_demo


@click.command("demo")
@click.option(
    "--dir", "directory", default=".demo", show_default=True, metavar="DIR",
    help="Where the demo keeps its model and its logs.",
)  # fmt: skip
def command(directory: str) -> None:
    """Start a private Redis and a worker, submit 240 prompts, print progress and results, stop everything."""
    try:
        run_demo(Path(directory), DemoConsole())
    except (DemoFailed, NoRedisServer) as error:
        raise CommandError(str(error)) from error
