"""A command group that imports a command only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from worker.cli.command_error import CommandError
from worker.cli.install_hint import INSTALL_ENGINE, INSTALL_MONITOR
from worker.cli.lazy_command import LazyCommand


class LazyGroup(click.Group):
    """Commands by name, each in a module of its own.

    `millrace submit` runs in a producer that has no torch, and `millrace run` must not pay for celery: so no command
    is imported before it is asked for, not even for the list that `millrace --help` prints.
    """

    def __init__(self, *, lazy_commands: Mapping[str, LazyCommand], name: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._lazy_commands = lazy_commands

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which they are listed."""
        return list(self._lazy_commands)

    def summary_of(self, name: str) -> str:
        """What the list of commands says of one. Raises KeyError for a name it does not have."""
        return self._lazy_commands[name].summary

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """List the commands without importing them: some need packages that a producer does not have."""
        with formatter.section("Commands"):
            formatter.write_dl([(name, command.summary) for name, command in self._lazy_commands.items()])

    def invoke(self, ctx: click.Context) -> object:
        """Run the command. Raises CommandError where what it imports on its way, as torch, is not installed."""
        try:
            return super().invoke(ctx)
        except ModuleNotFoundError as error:
            raise CommandError(_missing(ctx.invoked_subcommand, error)) from error

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command. Raises CommandError where its module is not installed."""
        lazy = self._lazy_commands.get(cmd_name)
        if lazy is None:
            return None
        try:
            module = importlib.import_module(lazy.module)
        except ModuleNotFoundError as error:
            if error.name == lazy.module:
                raise CommandError(f"{cmd_name} is not part of this installation") from error
            raise CommandError(_missing(cmd_name, error)) from error
        command = module.command
        if not isinstance(command, click.Command):
            raise TypeError(f"{lazy.module}.command is {command!r}, not a click command")
        return command


def _missing(command: str | None, error: ModuleNotFoundError) -> str:
    hint = INSTALL_MONITOR if error.name == "flower" else INSTALL_ENGINE
    return f"{command} needs {error.name}, which is not installed: {hint}"
