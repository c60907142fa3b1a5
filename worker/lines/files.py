"""Reads files, plain or gzip, as raw request lines, and checks what only the whole file can get wrong.

Files that hold no request lines, such as weights, tables and archives, are told by how they begin.
"""

from __future__ import annotations

import gzip
import hashlib
import io
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import BinaryIO, Self, cast

from worker.lines.errors import LineError, UnreadableInput
from worker.lines.request_line import Endpoint, RequestLine

GZIP_MAGIC = b"\x1f\x8b"
UNPACKED_BYTES = 128 * 1024  # unpacked at a time
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


@dataclass(frozen=True, slots=True)
class InputFile:
    """A file of lines, opened when its turn comes: of ten thousand files one is open."""

    name: str  # its path, - for standard input
    open: Callable[[], io.BufferedReader]
    is_complete: bool  # a file on disk; False: a pipe or a terminal, whose writer may be slow


def read_input_files(files: Iterable[InputFile], max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of one file after the other, as read_raw_lines does, in bounded memory.

    Gzip, known by its first two bytes and not by its name, is unpacked, from a pipe too. A file's last line ends with
    the file. Raises UnreadableInput after the lines before the fault, and for a file that holds no lines at all, see
    other_format.
    """
    for file in files:
        try:
            with file.open() as packed:
                unpacked = _unpacked(packed)
                _refuse_other_formats(file.name, unpacked)
                yield from read_raw_lines(unpacked, max_line_bytes)
        except UnreadableInput:
            raise
        except (EOFError, zlib.error, gzip.BadGzipFile) as error:
            accepted = "accepted: plain lines, or whole gzip files"
            raise UnreadableInput(file.name, f"its gzip data is broken ({error}); {accepted}") from error
        except OSError as error:
            raise UnreadableInput(file.name, error.strerror or str(error)) from error


def refuse_other_formats(file: InputFile) -> None:
    """Raise UnreadableInput for a file on disk that holds no lines, see other_format; OSError if it cannot be read.

    Says nothing of broken gzip, which is found where the file is read.
    """
    with file.open() as packed, suppress(EOFError, zlib.error, gzip.BadGzipFile):
        _refuse_other_formats(file.name, _unpacked(packed))


def _refuse_other_formats(name: str, file: io.BufferedReader) -> None:
    # A pipe may have given less so far: then its lines are refused one by one.
    what = other_format(file.peek(HEAD_BYTES)[:HEAD_BYTES])
    if what is not None:
        raise UnreadableInput(name, what)


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


def _unpacked(file: io.BufferedReader) -> io.BufferedReader:
    # A single byte may be all that a pipe has so far; no JSON begins with this one.
    head = file.peek(len(GZIP_MAGIC))[: len(GZIP_MAGIC)]
    if not head or not GZIP_MAGIC.startswith(head):
        return file
    return io.BufferedReader(cast("io.RawIOBase", gzip.GzipFile(fileobj=file)), UNPACKED_BYTES)


def read_raw_lines(file: BinaryIO, max_line_bytes: int) -> Iterator[bytes]:
    """Yield the lines of `file`, without their line ends, in bounded memory.

    Lines of white space only are skipped and not counted, and so is a byte order mark at the beginning. A line longer
    than `max_line_bytes` is cut one byte above that, so that parse_request_line refuses it, also where it is blank so
    far: a request may follow.
    """
    mark = BOM  # of the first line
    while True:
        raw = file.readline(len(mark) + max_line_bytes + 2)  # room for a line end of two bytes
        if not raw:
            return
        raw, mark = raw.removeprefix(mark), b""
        is_cut = not raw.endswith(b"\n") and len(raw) > max_line_bytes and _skip_to_line_end(file)
        raw = raw if is_cut else raw.rstrip(b"\r\n")
        if raw.strip() or len(raw) > max_line_bytes:
            yield raw[: max_line_bytes + 1]


class LineSplitter:
    """read_raw_lines for data that is handed over as it comes: the same lines, of however cut data.

    What is held does not grow: at most a line of the largest size.
    """

    def __init__(self, max_line_bytes: int) -> None:
        self._max_bytes = max_line_bytes
        self._mark = BOM  # of the first line
        self._kept = bytearray()  # of a line whose end has not come
        self._is_cut = False  # more of it came than is kept

    def feed(self, data: bytes) -> Iterator[bytes]:
        """The lines that end in `data`."""
        *ended, rest = data.split(b"\n")
        for part in ended:
            self._keep(part)
            yield from self.end()
        self._keep(rest)

    def end(self) -> Iterator[bytes]:
        """The line that has come, at the end of the data too, where it may have none."""
        raw, is_cut, mark = bytes(self._kept), self._is_cut, self._mark
        self._kept.clear()
        self._is_cut, self._mark = False, b""
        raw = raw.removeprefix(mark)
        raw = raw if is_cut else raw.rstrip(b"\r\n")
        if raw.strip() or len(raw) > self._max_bytes:
            yield raw[: self._max_bytes + 1]

    def _keep(self, part: bytes) -> None:
        room = len(self._mark) + self._max_bytes + 2 - len(self._kept)
        self._is_cut = self._is_cut or len(part) > room
        self._kept += part[:room]


def _skip_to_line_end(file: BinaryIO) -> bool:
    """Skip the rest of a line; False if that was its end alone, or the end of the file."""
    rest = first = file.readline(65536)
    while rest and not rest.endswith(b"\n"):
        rest = file.readline(65536)
    return first not in (b"", b"\n")


@dataclass(frozen=True, slots=True)
class LinesDigest:
    """What tells one input from another, however it is packed, cut into files and spaced with blank lines."""

    num_lines: int  # blank ones not counted
    digest: str  # 16 hexadecimal digits

    @classmethod
    def of(cls, raw_lines: Iterable[bytes]) -> Self:
        """The digest of lines as read_raw_lines gives them. Raises what reading them raises."""
        num_lines, digest = 0, hashlib.blake2b(digest_size=8)
        for raw in raw_lines:
            num_lines += 1
            digest.update(raw)
            digest.update(b"\n")
        return cls(num_lines, digest.hexdigest())


class FileChecks:
    """Compares each line of one file with the lines before it and with what the file was submitted for.

    Each custom_id stands once, and each line names the endpoint that the file was submitted for, if it was for one. In
    a strict file, which keeps OpenAI's rules, all lines name the first one's endpoint. Of each custom_id 16 bytes are
    kept.
    """

    def __init__(self, *, endpoint: str | None, is_strict: bool) -> None:
        self._custom_ids = CustomIds()
        self._endpoint = endpoint
        self._is_strict = is_strict
        self._endpoints: dict[Endpoint, None] = {}  # in the order of the file

    @property
    def endpoints(self) -> tuple[Endpoint, ...]:
        """The endpoints of the good lines so far, in the order of their first lines."""
        return tuple(self._endpoints)

    def add(self, line: RequestLine) -> None:
        """Take the file's next line. Raises LineError for a bad one, with which later lines are not compared."""
        self._check_endpoint(line)
        self._custom_ids.add(line)
        self._endpoints[line.endpoint] = None

    def _check_endpoint(self, line: RequestLine) -> None:
        wanted, whose = self._endpoint, "the endpoint that the job was submitted for"
        if wanted is None and self._is_strict:
            wanted, whose = next(iter(self._endpoints), None), "as the first line has it"
        if wanted not in (None, line.endpoint):
            raise refusal(line, f"url is {line.endpoint}; accepted: {wanted}, {whose}", "url_mismatch", "url")


def refusal(line: RequestLine, message: str, code: str, param: str) -> LineError:
    """What is wrong with a line that is good by itself."""
    return LineError(message, code=code, index=line.index, param=param, custom_id=line.custom_id)


class CustomIds:
    """Remembers a job's custom_ids by 16-byte digests: an id may have 512 characters, a file millions of lines."""

    def __init__(self) -> None:
        self._seen: set[bytes] = set()

    def add(self, line: RequestLine) -> None:
        """Take `line`'s custom_id. Raises LineError if an earlier line has it."""
        digest = hashlib.blake2b(line.custom_id.encode("utf-8"), digest_size=16).digest()
        if digest in self._seen:
            message = f"custom_id {line.custom_id!r} was used by an earlier line; accepted: each custom_id once"
            raise refusal(line, message, "duplicate_custom_id", "custom_id")
        self._seen.add(digest)
