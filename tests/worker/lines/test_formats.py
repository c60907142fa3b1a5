"""Files that hold no request lines are told by how they begin, and files of lines are not taken for others."""

from __future__ import annotations

import gzip
import io
import json
import sqlite3
import tarfile
import zipfile
from functools import partial
from pathlib import Path

import pytest
import torch
from safetensors.torch import save

from tests.support.request_lines import chat_line, completion_line
from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile, other_format, read_input_files, read_raw_lines

GOOD = completion_line()


def packed(kind: str, directory: Path) -> bytes:
    """A small file of this kind."""
    path = directory / "file"
    match kind:
        case "tar":
            with tarfile.open(path, "w") as tar:
                tar.addfile(tarfile.TarInfo("a.jsonl"))
        case "zip":
            with zipfile.ZipFile(path, "w") as archive:
                archive.writestr("a.jsonl", GOOD)
        case "sqlite":
            with sqlite3.connect(path) as database:
                database.execute("CREATE TABLE t (a)")
            database.close()
        case "torch":
            torch.save({"weight": torch.zeros(2)}, path)
        case _:
            path.write_bytes(save({"weight": torch.zeros(2)}))
    return path.read_bytes()


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("safetensors", "a safetensors file"), ("tar", "a tar archive"), ("zip", "a ZIP archive"),
        ("sqlite", "an SQLite database"), ("torch", "a ZIP archive"),
    ],
)  # fmt: skip
def test_real_files_of_other_kinds_are_told_by_what_they_are(tmp_path: Path, kind: str, name: str) -> None:
    assert name in (other_format(packed(kind, tmp_path)) or "")


@pytest.mark.parametrize(
    ("head", "name"),
    [
        (b"PAR1\x15\x00", "a Parquet file"), (b"GGUF\x03\x00", "a GGUF file"), (b"%PDF-1.7\n", "a PDF"),
        (gzip.compress(GOOD, mtime=0), "gzip inside gzip"), (b"\x28\xb5\x2f\xfd\x04", "zstd"),
        (GOOD.decode().encode("utf-16"), "UTF-16"),
        (b"id,prompt\n1,hello\n", "a table"), (b'"id";"the prompt"\n1;"hello"\n', "a table"),
        (b"\xef\xbb\xbfid\tprompt\n", "a table"),
        (b'[{"prompt": "a"}]', "one JSON array"), (b'[\n  {\n    "prompt": "a"\n  }\n]\n', "one JSON array"),
        (b'{\n  "prompt": "a"\n}\n', "go over several lines"),
    ],
)  # fmt: skip
def test_other_files_are_told_by_how_they_begin(head: bytes, name: str) -> None:
    what = other_format(head)

    assert what is not None
    assert name in what
    assert "; accepted: " in what


@pytest.mark.parametrize(
    "head",
    [
        b"", b"\n\n", GOOD, b"\xef\xbb\xbf" + GOOD, b"\n" + chat_line(), b"bad\n" + GOOD, b"[1, 2]\n" + GOOD,
        b"one,two\n" + GOOD, b"Hello, world, how are you\n", b"{", b"{bad}\n", b"12345678{", b"[]\n", b"\xff{",
        json.dumps({"prompt": "a,b\n" * 5000}).encode(),
    ],
)  # fmt: skip
def test_lines_bad_ones_among_them_are_not_taken_for_another_file(head: bytes) -> None:
    assert other_format(head[:4096]) is None


def opened(path: Path) -> io.BufferedReader:
    return path.open("rb")


def input_file(path: Path) -> InputFile:
    return InputFile(path.name, partial(opened, path), True)


def test_another_file_among_the_inputs_is_an_error_that_names_it(tmp_path: Path) -> None:
    (tmp_path / "good.jsonl").write_bytes(GOOD)
    (tmp_path / "table.gz").write_bytes(gzip.compress(b"id,prompt\n"))
    lines = read_input_files([input_file(tmp_path / "good.jsonl"), input_file(tmp_path / "table.gz")], 100)

    assert next(lines) == GOOD
    with pytest.raises(UnreadableInput, match=r"^table\.gz: it is a table \(CSV\); accepted: request lines"):
        next(lines)


@pytest.mark.parametrize("pack", [bytes, gzip.compress])
def test_a_byte_order_mark_at_the_beginning_of_a_file_is_skipped(tmp_path: Path, pack: type[bytes]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).write_bytes(pack(b"\xef\xbb\xbf" + GOOD + b"\n" + GOOD))

    assert list(read_input_files([input_file(tmp_path / name) for name in ("a", "b")], 100)) == [GOOD] * 4


def test_a_byte_order_mark_has_no_length_and_stands_at_the_beginning() -> None:
    mark = b"\xef\xbb\xbf"
    data = mark + b"x" * 10 + b"\r\n" + mark + b"y\n"

    assert list(read_raw_lines(io.BytesIO(data), 10)) == [b"x" * 10, mark + b"y"]
    assert list(read_raw_lines(io.BytesIO(mark + b"\n" + b"z" * 13 + b"\n"), 10)) == [b"z" * 11]
    assert list(read_raw_lines(io.BytesIO(mark), 10)) == []
