"""A compressed file that others may read while it is written."""

from __future__ import annotations

import gzip
import time
import zlib
from typing import BinaryIO

# Every flush ends a block of the compression: one a record would make a file of short records half as large again.
FLUSH_EVERY_S = 1.0


class GzipOutput(gzip.GzipFile):
    """Flushes at most once a second, with a write, and at the end.

    What is written within a second of a flush waits for the first write after that second, however long that takes: a
    kill costs no more than what was written in one second, but also costs it long afterwards.
    """

    def __init__(self, file: BinaryIO) -> None:
        # Neither name nor time: equal records make equal files.
        super().__init__(filename="", mode="wb", fileobj=file, mtime=0)
        self._flushed_at_s = time.monotonic()

    def flush(self, zlib_mode: int = zlib.Z_SYNC_FLUSH) -> None:
        """Hand on what was written, unless that was done within the last second: then a later flush does."""
        now_s = time.monotonic()
        if now_s - self._flushed_at_s >= FLUSH_EVERY_S:
            super().flush(zlib_mode)
            self._flushed_at_s = now_s
