"""Raw request lines, read ahead of whoever runs them."""

from __future__ import annotations

import queue
import threading
from typing import BinaryIO

from worker.lines.read_raw_lines import read_raw_lines


class LineFeed:
    """Reads a file on a thread of its own, so that a slow producer on a pipe never stalls the engine.

    At most `capacity` lines are held. The thread is a daemon and closes the file itself: a read from a terminal or a
    pipe cannot be interrupted, and closing a file under a read waits for it.
    """

    def __init__(self, file: BinaryIO, *, max_line_bytes: int, capacity: int) -> None:
        self._file = file
        self._max_line_bytes = max_line_bytes
        self._lines: queue.Queue[bytes | None] = queue.Queue(maxsize=capacity)  # None: the end
        self._error: OSError | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="line-feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the last line was taken."""
        return self._ended

    def take(self, wait_s: float) -> bytes | None:
        """The next line, or None if there is none within `wait_s` seconds. Raises OSError if reading failed."""
        if self._ended:
            return None
        try:
            raw = self._lines.get(timeout=wait_s)
        except queue.Empty:
            return None
        if raw is None:
            self._ended = True
            if self._error is not None:
                raise self._error
        return raw

    def _read(self) -> None:
        try:
            with self._file:
                for raw in read_raw_lines(self._file, self._max_line_bytes):
                    self._lines.put(raw)
        except OSError as error:
            self._error = error  # raised where the lines are taken: a thread has nobody to tell
        self._lines.put(None)
