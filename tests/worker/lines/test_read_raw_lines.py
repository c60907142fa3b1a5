from __future__ import annotations

import io

import pytest

from settings import LimitSettings
from tests.support.request_lines import completion_line
from worker.lines.errors import LineError
from worker.lines.files import read_raw_lines
from worker.lines.parse import parse_request_line


def lines_of(data: bytes, max_line_bytes: int = 100) -> list[bytes]:
    return list(read_raw_lines(io.BytesIO(data), max_line_bytes))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_line_ends_and_blank_lines_are_dropped(end: bytes) -> None:
    assert lines_of(b"a\n\r\n  \nb\r\nc" + end) == [b"a", b"b", b"c"]


def test_an_empty_file_has_no_lines() -> None:
    assert lines_of(b"") == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_of_the_full_length_is_whole(end: bytes) -> None:
    assert lines_of(b"x" * 100 + end + b"y", 100) == [b"x" * 100, b"y"]


@pytest.mark.parametrize("length", [101, 102, 103, 200, 100_000])
def test_a_longer_line_is_cut_and_its_neighbours_are_not(length: int) -> None:
    assert lines_of(b"a\n" + b"x" * length + b"\nb\n", 100) == [b"a", b"x" * 101, b"b"]


def test_a_cut_line_is_refused() -> None:
    limits = LimitSettings(max_prompt_bytes=10)
    [raw] = lines_of(completion_line(), 10)

    with pytest.raises(LineError, match="more than 10 bytes"):
        parse_request_line(raw, 0, limits)


@pytest.mark.parametrize("blank", [b" ", b"\t", b"\r"])
def test_a_line_that_is_blank_up_to_the_cut_is_refused_and_not_dropped(blank: bytes) -> None:
    limits = LimitSettings(max_prompt_bytes=100)
    raw, after = lines_of(blank * 200_000 + completion_line() + b"\nb", 100)

    assert after == b"b"
    with pytest.raises(LineError, match="more than 100 bytes"):
        parse_request_line(raw, 0, limits)


def test_a_carriage_return_at_the_end_of_a_file_counts_for_no_length() -> None:
    assert lines_of(b"x" * 100 + b"\r", 100) == [b"x" * 100]
