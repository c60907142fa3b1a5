"""Defines the exit codes, the errors that end a command with one line and such a code, and what Ctrl-C does."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import IntEnum
from types import FrameType
from typing import IO, Any

import click


class ExitCode(IntEnum):
    """Exit codes of `millrace`."""

    DONE = 0  # lines may have failed: their errors are in the output
    FAILED = 1  # the job failed, expired or was cancelled, or Redis or the model cannot be had
    USAGE = 2  # bad usage or settings
    INTERRUPTED = 130  # Ctrl-C: 128 + SIGINT, as shells have it
    # A worker whose engine broke or hung exits with os.EX_SOFTWARE, 70.


def printable(text: str) -> str:
    """`text` with everything a terminal would not show as it is written as an escape, such as \\n or \\x1b.

    What users write (metadata, names, errors that quote a line) would else forge lines, or tell the terminal to act.
    """
    return text if text.isprintable() else "".join(map(_shown, text))


def _shown(character: str) -> str:
    return character if character.isprintable() else character.encode("unicode_escape").decode()


class CommandError(click.ClickException):
    """One line on stderr and exit code 1: Redis or the model cannot be had, or the job did not complete."""

    exit_code = int(ExitCode.FAILED)

    def show(self, file: IO[Any] | None = None) -> None:
        """Print the line without click's usage text, since the command line itself was right."""
        lines = map(printable, self.format_message().split("\n"))
        click.echo("\n".join(["millrace: " + next(lines), *lines]), file=file, err=file is None)


class BadUsage(CommandError):
    """One line on stderr and exit code 2."""

    exit_code = int(ExitCode.USAGE)


class Interrupted(CommandError):
    """One line on stderr and exit code 130: Ctrl-C, what goes on without the command, and how to come back to it."""

    exit_code = int(ExitCode.INTERRUPTED)


@contextmanager
def stop_signals(*numbers: signal.Signals) -> Iterator[Callable[[], bool]]:
    """Let the first of these signals ask to stop between two steps; the second acts as without this."""
    stop = threading.Event()
    before = {number: signal.getsignal(number) for number in numbers}

    def on_signal(_number: int, _frame: FrameType | None) -> None:
        stop.set()
        for number, handler in before.items():
            signal.signal(number, handler)

    for number in before:
        signal.signal(number, on_signal)
    try:
        yield stop.is_set
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


@contextmanager
def refusals_in_a_line() -> Iterator[None]:
    """Raise what settings or machine do not allow as BadUsage, and other errors of the engine as CommandError."""
    # Not at the top: a producer has no engine, and listing the commands does not need the settings (0.3 s).
    from engine.errors import CapabilityError, EngineError  # noqa: PLC0415
    from settings import SettingsError  # noqa: PLC0415

    try:
        yield
    except (SettingsError, CapabilityError) as error:
        raise BadUsage(str(error)) from error
    except EngineError as error:
        raise CommandError(str(error)) from error
