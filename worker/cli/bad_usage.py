"""A command given a setting or a file that it cannot use."""

from __future__ import annotations

from worker.cli.command_error import CommandError
from worker.cli.exit_code import ExitCode


class BadUsage(CommandError):
    """One line on stderr and exit code 2."""

    exit_code = int(ExitCode.USAGE)
