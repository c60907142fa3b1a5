"""Tells files that hold no request lines, such as weights, tables and archives, by how they begin."""

from __future__ import annotations

import re

BOM = b"\xef\xbb\xbf"  # what some editors put before UTF-8
HEAD_BYTES = 4096  # of a file are looked at

_LINES = "accepted: request lines (JSONL), plain or gzip"

_BEGINNINGS = {
    b"PAR1": "a Parquet file",
    b"ARROW1": "an Arrow file",
    b"Obj\x01": "an Avro file",
    b"SQLite format 3\x00": "an SQLite database",
    b"GGUF": "a GGUF file, which holds a model's weights",
    b"\x89HDF\r\n": "an HDF5 file",
    b"\x93NUMPY": "a NumPy array",
    b"%PDF-": "a PDF file",
    b"PK\x03\x04": "a ZIP archive, as .xlsx, .docx and PyTorch's .bin and .pt are",
    b"7z\xbc\xaf\x27\x1c": "a 7z archive",
    b"\x1f\x8b": "gzip inside gzip",
    b"\x28\xb5\x2f\xfd": "compressed with zstd",
    b"BZh": "compressed with bzip2",
    b"\xfd7zXZ\x00": "compressed with xz",
}
_TAR = (257, b"ustar")  # where a tar archive says so

_MAX_SAFETENSORS_HEADER = 100_000_000  # bytes, as the format has it

# A column's name. Prose has a space behind its commas, so it is not taken for a table.
_NAME = r'"?[^\W\d][\w./-]*(?: [\w./-]+)*"?'
_HEADER = re.compile("|".join(rf"{_NAME}(?:{separator}{_NAME})+" for separator in (",", ";", "\t")))


def other_format(head: bytes) -> str | None:
    """What a file is that begins so, gzip unpacked, and what is accepted instead; None if it may be request lines.

    A file whose first lines are merely bad is not told from one of lines: each of them gets its error record.
    """
    if head[:2] in (b"\xff\xfe", b"\xfe\xff"):
        return "it is text in UTF-16; accepted: UTF-8"
    for beginning, kind in _BEGINNINGS.items():
        if head.startswith(beginning):
            return f"it is {kind}; {_LINES}"
    place, mark = _TAR
    if head[place : place + len(mark)] == mark:
        return f"it is a tar archive; {_LINES}"
    if _is_safetensors(head):
        return f"it is a safetensors file, which holds a model's weights (--model DIR takes its directory); {_LINES}"
    return _other_text([line.strip() for line in head.removeprefix(BOM).split(b"\n") if line.strip()])


def _is_safetensors(head: bytes) -> bool:
    """Whether it begins with the length of a JSON object, in 8 bytes, and the object."""
    return head[8:9] == b"{" and int.from_bytes(head[:8], "little") <= _MAX_SAFETENSORS_HEADER


def _other_text(lines: list[bytes]) -> str | None:
    """Of text that is none: JSON that is no JSONL, and tables; `lines` has no blank ones, the last may be cut."""
    first, second = (*lines, b"", b"")[:2]
    if re.match(rb"\[\s*\{", first) or (first == b"[" and second.startswith(b"{")):
        return "it is one JSON array; accepted: an object a line, as jq -c '.[]' FILE writes them"
    if first == b"{" and second.startswith(b'"'):
        return "its JSON objects go over several lines; accepted: an object a line, as jq -c . FILE writes them"
    is_table = _HEADER.fullmatch(first.decode("utf-8", "replace")) is not None
    if is_table and not any(line.startswith(b"{") for line in lines):
        return "it is a table (CSV); accepted: request lines (JSONL), a JSON object for each row"
    return None
