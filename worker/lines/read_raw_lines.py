"""A file to raw request lines."""

from __future__ import annotations

from collections.abc import Iterator
from typing import BinaryIO


def read_raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `file`, without their line ends, in bounded memory.

    Lines of white space only are skipped and not counted. A line longer than `max_line_bytes` is cut one byte
    above that, which is enough for parse_request_line to refuse it: also one that is blank up to there, behind which
    a request may stand.
    """
    while True:
        raw = file.readline(max_line_bytes + 2)  # room for a line end of two bytes
        if not raw:
            return
        is_cut = not raw.endswith(b"\n") and len(raw) > max_line_bytes and _skip_to_line_end(file)
        raw = raw if is_cut else raw.rstrip(b"\r\n")
        if raw.strip() or len(raw) > max_line_bytes:
            yield raw[: max_line_bytes + 1]


def _skip_to_line_end(file: BinaryIO) -> bool:
    """Whether there was more than the end of the file."""
    rest = first = file.readline(65536)
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(65536)
    return bool(first)
