"""Progress on a terminal."""

from __future__ import annotations

import os
import time
from typing import TextIO

REFRESH_S = 0.2
UNKNOWN_COLUMNS = 80
LONGEST_BAR, SHORTEST_BAR = 30, 10


class ProgressLine:
    """One line that is written over again and again. Silent where `stream` is no terminal."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._enabled = stream.isatty()
        self._shown_at_s = float("-inf")
        self._width = 0

    @property
    def is_due(self) -> bool:
        """Whether a new text would be shown now."""
        return self._enabled and time.monotonic() - self._shown_at_s >= REFRESH_S

    def show(self, text: str, done: float | None = None) -> None:
        """Replace the line's text, if it has stood long enough to be read. `done`, 0 to 1, is drawn as a bar."""
        if self.is_due:
            self._write(text, done)

    def close(self, text: str, done: float | None = None) -> None:
        """Show `text` for good and go to the next line."""
        if self._enabled:
            self._write(text, done)
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, text: str, done: float | None) -> None:
        # A line that reaches the last column goes on in the next one, and \r does not come back from there.
        columns = self._columns() - 1
        line = (text if done is None else f"{_bar(done, columns - len(text) - 3)}{text}")[:columns]
        self._stream.write("\r" + line.ljust(self._width))
        self._stream.flush()
        self._width = len(line)
        self._shown_at_s = time.monotonic()

    def _columns(self) -> int:
        try:
            return os.get_terminal_size(self._stream.fileno()).columns or UNKNOWN_COLUMNS
        except OSError:
            return UNKNOWN_COLUMNS


def _bar(done: float, room: int) -> str:
    """A bar of at most `room` columns between its brackets, and a space; nothing where that would say nothing."""
    width = min(room, LONGEST_BAR)
    if width < SHORTEST_BAR:
        return ""
    filled = int(done * width)
    return f"[{'#' * filled}{'-' * (width - filled)}] "
