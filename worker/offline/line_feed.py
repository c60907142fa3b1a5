"""Request lines, read ahead of whoever runs them."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterable

from settings import LimitSettings
from worker.offline.run_order import Line, in_file_order, in_prefix_order


class LineFeed:
    """Reads raw lines on a thread of its own, so that a slow producer on a pipe never stalls the engine.

    `by_prefix` sorts them, see run_order: for files that are complete; a pipe is taken as it comes. At most `capacity`
    lines are held, and keys. The thread is a daemon: a read from a terminal or a pipe cannot be interrupted, and
    closing a file under a read waits for it.
    """

    def __init__(self, raw_lines: Iterable[bytes], limits: LimitSettings, *, capacity: int, by_prefix: bool) -> None:
        self._raw_lines = raw_lines
        self._order = in_prefix_order if by_prefix else in_file_order
        self._limits = limits
        self._lines: queue.Queue[Line | None] = queue.Queue(maxsize=capacity)  # None: the end
        self._error: Exception | None = None
        self._ended = False
        self._thread = threading.Thread(target=self._read, name="line-feed", daemon=True)

    def start(self) -> None:
        """Begin to read."""
        self._thread.start()

    @property
    def ended(self) -> bool:
        """Whether the last line was taken."""
        return self._ended

    def take(self, max_lines: int, wait_s: float) -> list[Line]:
        """The next lines, as far as they are there; none if there is none within `wait_s` seconds.

        Behind the last of them raises what reading the file raised.
        """
        lines: list[Line] = []
        while len(lines) < max_lines and not self._ended:
            try:
                line = self._lines.get_nowait() if lines else self._lines.get(timeout=wait_s)
            except queue.Empty:
                break
            if line is None:
                self._ended = True
            else:
                lines.append(line)
        if not lines and self._ended and self._error is not None:
            raise self._error
        return lines

    def _read(self) -> None:
        try:
            for line in self._order(self._raw_lines, self._limits):
                self._lines.put(line)
        except Exception as error:  # a seam: whatever it was, the end of the lines must come
            self._error = error  # raised where the lines are taken: a thread has nobody to tell
        self._lines.put(None)
