"""Progress on a terminal."""

from __future__ import annotations

import time
from typing import TextIO

REFRESH_S = 0.2


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

    def show(self, text: str) -> None:
        """Replace the line's text, if it has stood long enough to be read."""
        if self.is_due:
            self._write(text)

    def close(self, text: str) -> None:
        """Show `text` for good and go to the next line."""
        if self._enabled:
            self._write(text)
            self._stream.write("\n")
            self._stream.flush()

    def _write(self, text: str) -> None:
        self._stream.write("\r" + text.ljust(self._width))
        self._stream.flush()
        self._width = len(text)
        self._shown_at_s = time.monotonic()
