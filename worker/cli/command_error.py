"""A command that cannot do what it was asked."""

from __future__ import annotations

from typing import IO, Any

import click

from worker.cli.exit_code import ExitCode


class CommandError(click.ClickException):
    """One line on stderr and exit code 1: Redis or the model cannot be had, or the job did not complete."""

    exit_code = int(ExitCode.FAILED)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line, without click's usage text: what is wrong is not how the command was written."""
        click.echo(f"millrace: {self.format_message()}", file=file, err=file is None)
