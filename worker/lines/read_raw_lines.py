"""A file to raw request lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO


def read_raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `file`, without their line ends, in bounded memory.

    Lines of white space only are skipped and not counted. A line longer than `max_line_bytes` is cut one byte
    above that, which is enough for parse_request_line to refuse it.
    """
    while True:
        raw = file.readline(max_line_bytes + 2)  # room for a line end of two bytes
        if not raw:
            return
        if not raw.endswith(b"\n") and len(raw) > max_line_bytes:
            _skip_to_line_end(file)
        raw = raw.rstrip(b"\r\n")
        if raw.strip():
            yield raw[: max_line_bytes + 1]


def _skip_to_line_end(file: BinaryIO) -> None:
    while True:
        rest = file.readline(65536)
        if not rest or rest.endswith(b"\n"):
            return
