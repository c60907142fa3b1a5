"""Files of request lines: several as one, gzip or not, whole or broken, and checks of a file as a whole."""

from __future__ import annotations

import gzip
import io
import os
import threading
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from settings import LimitSettings
from tests.support.request_lines import CHAT, COMPLETIONS, chat_line, completion_line, parse
from worker.lines.errors import LineError, UnreadableInput
from worker.lines.files import FileChecks, InputFile, read_input_files, read_raw_lines
from worker.lines.parse import parse_request_line
from worker.lines.request_line import Endpoint

MAX_LINE_BYTES = 100


def opened(path: Path) -> io.BufferedReader:
    return path.open("rb")


def lines_of(tmp_path: Path, *contents: bytes) -> list[bytes]:
    files = []
    for number, content in enumerate(contents):
        path = tmp_path / f"{number}.jsonl"
        path.write_bytes(content)
        files.append(InputFile(path.name, partial(opened, path), True))
    return list(read_input_files(files, MAX_LINE_BYTES))


def test_files_are_read_one_after_the_other_and_each_ends_a_line(tmp_path: Path) -> None:
    assert lines_of(tmp_path, b"a\nb", b"", b"\nc\r\n", b"d") == [b"a", b"b", b"c", b"d"]


def test_gzip_is_told_by_its_first_bytes_and_unpacked(tmp_path: Path) -> None:
    two_members = gzip.compress(b"b\nc") + gzip.compress(b"c\nd\n")
    assert lines_of(tmp_path, b"a\n", two_members, b"e") == [b"a", b"b", b"cc", b"d", b"e"]
    assert lines_of(tmp_path, gzip.compress(b""), b"a") == [b"a"]


@pytest.mark.parametrize("content", [b"\x1f", b"\x1f{", b"\x8b\x1f"])
def test_what_only_looks_like_gzip_is_no_silence(tmp_path: Path, content: bytes) -> None:
    if content == b"\x1f":  # all there is of a file: no JSON begins so
        with pytest.raises(UnreadableInput):
            lines_of(tmp_path, content)
    else:
        assert lines_of(tmp_path, content) == [content]


def broken_gzip() -> dict[str, bytes]:
    whole = gzip.compress(b'{"prompt": "a"}\n' * 1000)
    return {
        "cut in its data": whole[: len(whole) // 2],
        "cut in its checksum": whole[:-3],
        "only a header": whole[:9],
        "a wrong checksum": whole[:-8] + b"\0\0\0\0" + whole[-4:],
        "a wrong byte in its data": whole[:30] + bytes([whole[30] ^ 0xFF]) + whole[31:],
        "something behind its end": whole + b'{"prompt": "b"}\n',
    }


@pytest.mark.parametrize("fault", list(broken_gzip()))
def test_broken_gzip_is_an_error_that_names_the_file(tmp_path: Path, fault: str) -> None:
    with pytest.raises(UnreadableInput, match=r"^1\.jsonl: its gzip data is broken .*accepted: plain lines, or whole"):
        lines_of(tmp_path, b"a\n", broken_gzip()[fault])


def test_a_file_that_is_gone_when_its_turn_comes_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(UnreadableInput, match=r"^gone: No such file"):
        list(read_input_files([InputFile("gone", partial(opened, tmp_path / "gone"), True)], MAX_LINE_BYTES))


def test_one_file_is_open_at_a_time(tmp_path: Path) -> None:
    handles: list[io.BufferedReader] = []
    path = tmp_path / "a"
    path.write_bytes(b"x\n")

    def noted() -> io.BufferedReader:
        assert all(handle.closed for handle in handles)
        handles.append(opened(path))
        return handles[-1]

    assert len(list(read_input_files([InputFile("a", noted, True)] * 3, MAX_LINE_BYTES))) == 3
    assert [handle.closed for handle in handles] == [True] * 3


def test_a_pipe_may_be_gzip_and_come_byte_by_byte() -> None:
    reading, writing = os.pipe()

    def feed() -> None:
        with os.fdopen(writing, "wb", buffering=0) as pipe:
            for byte in gzip.compress(b"a\nb\n"):
                pipe.write(bytes([byte]))

    thread = threading.Thread(target=feed)
    thread.start()
    source = InputFile("-", lambda: os.fdopen(reading, "rb"), False)
    assert list(read_input_files([source], MAX_LINE_BYTES)) == [b"a", b"b"]
    thread.join()


def test_memory_does_not_grow_with_what_a_small_file_unpacks_to(tmp_path: Path) -> None:
    path = tmp_path / "bomb.gz"
    with gzip.open(path, "wb", compresslevel=1) as file:
        for _ in range(64):
            file.write(b"x" * (1 << 20))
        file.write(b"\nend\n")
    assert path.stat().st_size < 1 << 20
    tracemalloc.start()
    try:
        lines = list(read_input_files([InputFile("bomb", partial(opened, path), True)], MAX_LINE_BYTES))
        peak = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert [len(line) for line in lines] == [MAX_LINE_BYTES + 1, 3]
    assert peak < 2 << 20


def raw_lines_of(data: bytes, max_line_bytes: int = 100) -> list[bytes]:
    return list(read_raw_lines(io.BytesIO(data), max_line_bytes))


@pytest.mark.parametrize("end", [b"", b"\n", b"\r\n", b"\n\n \n"])
def test_line_ends_and_blank_lines_are_dropped(end: bytes) -> None:
    assert raw_lines_of(b"a\n\r\n  \nb\r\nc" + end) == [b"a", b"b", b"c"]


def test_an_empty_file_has_no_lines() -> None:
    assert raw_lines_of(b"") == []


@pytest.mark.parametrize("end", [b"\n", b"\r\n"])
def test_a_line_of_the_full_length_is_whole(end: bytes) -> None:
    assert raw_lines_of(b"x" * 100 + end + b"y", 100) == [b"x" * 100, b"y"]


@pytest.mark.parametrize("length", [101, 102, 103, 200, 100_000])
def test_a_longer_line_is_cut_and_its_neighbours_are_not(length: int) -> None:
    assert raw_lines_of(b"a\n" + b"x" * length + b"\nb\n", 100) == [b"a", b"x" * 101, b"b"]


def test_a_cut_line_is_refused() -> None:
    limits = LimitSettings(max_prompt_bytes=10)
    [raw] = raw_lines_of(completion_line(), 10)

    with pytest.raises(LineError, match="more than 10 bytes"):
        parse_request_line(raw, 0, limits)


@pytest.mark.parametrize("blank", [b" ", b"\t", b"\r"])
def test_a_line_that_is_blank_up_to_the_cut_is_refused_and_not_dropped(blank: bytes) -> None:
    limits = LimitSettings(max_prompt_bytes=100)
    raw, after = raw_lines_of(blank * 200_000 + completion_line() + b"\nb", 100)

    assert after == b"b"
    with pytest.raises(LineError, match="more than 100 bytes"):
        parse_request_line(raw, 0, limits)


def test_a_carriage_return_at_the_end_of_a_file_counts_for_no_length() -> None:
    assert raw_lines_of(b"x" * 100 + b"\r", 100) == [b"x" * 100]


def _checks(*, strict: bool = False, endpoint: Endpoint | None = None) -> FileChecks:
    return FileChecks(endpoint=endpoint, is_strict=strict)


def _codes(checks: FileChecks, *lines: bytes) -> list[str | None]:
    """The code that each line is refused with, None for a good one."""
    codes: list[str | None] = []
    for index, raw in enumerate(lines):
        try:
            checks.add(parse(raw, index))
        except LineError as error:
            codes.append(error.code)
        else:
            codes.append(None)
    return codes


def test_by_default_lines_may_name_any_endpoint_and_model() -> None:
    checks = _checks()
    assert _codes(checks, chat_line(model="a"), completion_line(model="b"), chat_line()) == [None, None, None]
    assert checks.endpoints == (CHAT, COMPLETIONS)


def test_by_default_a_custom_id_may_stand_once() -> None:
    assert _codes(_checks(), completion_line(custom_id="a"), chat_line(custom_id="a")) == [None, "duplicate_custom_id"]


@pytest.mark.parametrize("strict", [False, True])
def test_every_line_names_the_endpoint_that_the_job_was_submitted_for(strict: bool) -> None:
    checks = _checks(strict=strict, endpoint=Endpoint.CHAT_COMPLETIONS)
    assert _codes(checks, completion_line(custom_id="a"), chat_line(custom_id="a")) == ["url_mismatch", None]
    assert checks.endpoints == (CHAT,)


def test_the_lines_of_a_strict_file_name_the_first_ones_endpoint() -> None:
    checks = _checks(strict=True)
    assert _codes(checks, chat_line(), completion_line(), chat_line()) == [None, "url_mismatch", None]
