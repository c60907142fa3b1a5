"""The order in which an offline run takes the lines of its input."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import BinaryIO

from settings import LimitSettings
from worker.lines.custom_ids import CustomIds
from worker.lines.line_error import LineError
from worker.lines.parse_request_line import parse_request_line
from worker.lines.prefix_order import PrefixKey, prefix_sort_key
from worker.lines.read_raw_lines import read_raw_lines
from worker.lines.request_line import RequestLine

# Lines sorted together: their keys take up to 60 MB, and some 4 s of parsing come before the first of them runs.
MAX_SORTED_LINES = 50_000

Line = RequestLine | LineError


def in_file_order(file: BinaryIO, limits: LimitSettings) -> Iterator[Line]:
    """Each line as it comes, or what is wrong with it. Raises OSError."""
    custom_ids = CustomIds()
    for index, raw in enumerate(read_raw_lines(file, limits.max_prompt_bytes)):
        yield _parse(raw, index, limits, custom_ids)


def in_prefix_order(file: BinaryIO, limits: LimitSettings, max_sorted: int = MAX_SORTED_LINES) -> Iterator[Line]:
    """The lines of a file that can be read again, `max_sorted` at a time sorted by what their prompts begin with.

    Bad lines come first. Only keys and places are held, so that memory does not grow with the file. Raises OSError.
    """
    custom_ids = CustomIds()
    num_lines = 0
    while True:
        sorted_lines: list[tuple[PrefixKey, int, int]] = []  # key, index, place
        first_index = num_lines
        for place, raw in islice(_placed_lines(file, limits.max_prompt_bytes), max_sorted):
            line = _parse(raw, num_lines, limits, custom_ids)
            if isinstance(line, LineError):
                yield line
            else:
                sorted_lines.append((prefix_sort_key(line.prompt_key()), num_lines, place))
            num_lines += 1
        if num_lines == first_index:
            return
        goes_on_at = file.tell()
        sorted_lines.sort()
        for _, index, place in sorted_lines:
            file.seek(place)
            # Nothing is there if the file was cut meanwhile: a bad line then.
            yield _parse(next(read_raw_lines(file, limits.max_prompt_bytes), b""), index, limits, None)
        file.seek(goes_on_at)


def _placed_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[tuple[int, bytes]]:
    """Each line and where it begins, or where the blank lines before it do."""
    raw_lines = read_raw_lines(file, max_line_bytes)
    while True:
        place = file.tell()
        raw = next(raw_lines, None)
        if raw is None:
            return
        yield place, raw


def _parse(raw: bytes, index: int, limits: LimitSettings, custom_ids: CustomIds | None) -> Line:
    """`custom_ids`: those of the lines before it; None for a line that was checked against them."""
    try:
        line = parse_request_line(raw, index, limits)
        if custom_ids is not None:
            custom_ids.add(line)
    except LineError as error:
        return error
    return line
