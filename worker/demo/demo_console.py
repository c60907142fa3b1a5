"""What the demo prints."""

from __future__ import annotations

import sys
import time

import click

from worker.cli.progress_line import ProgressLine

LINE_EVERY_S = 1.0


class DemoConsole:
    """Lines for what happened, and one line of progress: rewritten on a terminal, printed once a second elsewhere."""

    def __init__(self) -> None:
        self._line = ProgressLine(sys.stderr)
        self._is_terminal = sys.stderr.isatty()
        self._progress: str | None = None
        self._printed_at_s = float("-inf")

    def say(self, text: str) -> None:
        """Print a line."""
        if self._progress is not None:
            self._line.close(self._progress)
            self._progress = None
        click.echo(text)

    def show(self, text: str) -> None:
        """Show progress."""
        if self._is_terminal:
            self._progress = text
            self._line.show(text)
        elif time.monotonic() - self._printed_at_s >= LINE_EVERY_S:
            self._printed_at_s = time.monotonic()
            click.echo(text, err=True)
