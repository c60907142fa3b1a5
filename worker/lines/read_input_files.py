"""Several files to raw request lines."""

from __future__ import annotations

import gzip
import io
import zlib
from collections.abc import Iterable, Iterator
from typing import BinaryIO, cast

from worker.lines.input_file import InputFile
from worker.lines.read_raw_lines import read_raw_lines
from worker.lines.unreadable_input import UnreadableInput

GZIP_MAGIC = b"\x1f\x8b"
UNPACKED_BYTES = 128 * 1024  # unpacked at a time


def read_input_files(files: Iterable[InputFile], max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of one file after the other, as read_raw_lines does, gzip unpacked, in bounded memory.

    What is gzip is told by its first two bytes, not by its name, so that a pipe may be. A file's last line ends with
    the file. Raises UnreadableInput, behind lines that come before the fault.
    """
    for file in files:
        try:
            with file.open() as packed:
                yield from read_raw_lines(_unpacked(packed), max_line_bytes)
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            accepted = "accepted: plain lines, or whole gzip files"
            raise UnreadableInput(file.name, f"its gzip data is broken ({error}); {accepted}") from error
        except OSError as error:
            raise UnreadableInput(file.name, error.strerror or str(error)) from error


def _unpacked(file: io.BufferedReader) -> BinaryIO:
    # A single byte may be all that a pipe has so far; no JSON begins with this one.
    head = file.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)]
    if not head or not GZIP_MAGIC.startswith(head):
        return file
    return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=file)), UNPACKED_BYTES)
