"""Files of request lines: several as one, gzip or not, whole or broken."""

from __future__ import annotations

import gzip
import io
import os
import threading
import tracemalloc
from functools import partial
from pathlib import Path

import pytest

from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile, read_input_files

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
