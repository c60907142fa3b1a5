"""A command group that imports a command only when it is used."""

from __future__ import annotations

import importlib
from collections.abc import Mapping

import click

from worker.cli.command_error import CommandError


class LazyGroup(click.Group):
    """Commands by name, each in a module of its own.

    `millrace submit` runs in a producer that has no torch, and `millrace run` must not pay for celery: so no command
    is imported before it is asked for.
    """

    def __init__(self, *, modules: Mapping[str, str], name: str, help: str) -> None:
        super().__init__(name=name, help=help)
        self._modules = modules

    def list_commands(self, ctx: click.Context) -> list[str]:
        """Names in the order in which they are listed."""
        return list(self._modules)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        """Import the command. Raises CommandError where its module is not installed."""
        path = self._modules.get(cmd_name)
        if path is None:
            return None
        try:
            module = importlib.import_module(path)
        except ModuleNotFoundError as error:
            raise CommandError(_missing(cmd_name, path, error)) from error
        command = module.command
        if not isinstance(command, click.Command):
            raise TypeError(f"{path}.command is {command!r}, not a click command")
        return command


def _missing(command: str, path: str, error: ModuleNotFoundError) -> str:
    if error.name == path:
        return f"{command} is not part of this installation"
    return f"{command} needs {error.name}, which is not installed: pip install 'millrace[engine]'"
