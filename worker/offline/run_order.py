"""The order in which an offline run takes the lines of its input."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import islice
from tempfile import SpooledTemporaryFile
from typing import IO

from settings import LimitSettings
from worker.lines.custom_ids import CustomIds
from worker.lines.line_error import LineError
from worker.lines.parse_request_line import parse_request_line
from worker.lines.prefix_order import PrefixKey, prefix_sort_key
from worker.lines.request_line import RequestLine

# Lines sorted together: their keys take up to 60 MB, and some 4 s of parsing come before the first of them runs.
MAX_SORTED_LINES = 50_000
# They wait in a temporary file, which an input that is packed or comes in parts could not be sought in for.
MAX_SORTED_BYTES = 256 * 1024 * 1024
BYTES_IN_MEMORY = 16 * 1024 * 1024  # a temporary file smaller than this is none

Line = RequestLine | LineError


def in_file_order(raw_lines: Iterable[bytes], limits: LimitSettings) -> Iterator[Line]:
    """Each line as it comes, or what is wrong with it. Raises what reading the lines raises."""
    custom_ids = CustomIds()
    for index, raw in enumerate(raw_lines):
        yield _parse(raw, index, limits, custom_ids)


def in_prefix_order(
    raw_lines: Iterable[bytes],
    limits: LimitSettings,
    max_sorted: int = MAX_SORTED_LINES,
    max_sorted_bytes: int = MAX_SORTED_BYTES,
) -> Iterator[Line]:
    """The lines, as many at a time as the two bounds allow sorted by what their prompts begin with; bad ones first.

    Memory does not grow with the input. Raises what reading the lines raises, and OSError for no room for a temporary
    file.
    """
    custom_ids = CustomIds()
    numbered = enumerate(raw_lines)
    while (first := next(numbered, None)) is not None:
        with SpooledTemporaryFile(BYTES_IN_MEMORY) as spool:
            keys: list[tuple[PrefixKey, int, int, int]] = []  # key, index, place, bytes
            place = 0
            for index, raw in _with_first(first, islice(numbered, max_sorted - 1)):
                line = _parse(raw, index, limits, custom_ids)
                if isinstance(line, LineError):
                    yield line
                    continue
                spool.write(raw)
                keys.append((prefix_sort_key(line.prompt_key()), index, place, len(raw)))
                place += len(raw)
                if place >= max_sorted_bytes:
                    break
            keys.sort()
            for _, index, place, size in keys:
                yield _parse(_read_at(spool, place, size), index, limits, None)


def _with_first(first: tuple[int, bytes], others: Iterable[tuple[int, bytes]]) -> Iterator[tuple[int, bytes]]:
    yield first
    yield from others


def _read_at(file: IO[bytes], place: int, size: int) -> bytes:
    file.seek(place)
    return file.read(size)


def _parse(raw: bytes, index: int, limits: LimitSettings, custom_ids: CustomIds | None) -> Line:
    """`custom_ids`: those of the lines before it; None for a line that was checked against them."""
    try:
        line = parse_request_line(raw, index, limits)
        if custom_ids is not None:
            custom_ids.add(line)
    except LineError as error:
        return error
    return line
