"""Opens the files that a command reads and writes, where `-` is stdin or stdout, and sends records to them."""

from __future__ import annotations

import glob
import gzip
import io
import os
import stat
import sys
import time
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import BinaryIO, Self, cast

from worker.cli.exit_codes import BadUsage
from worker.lines.errors import UnreadableInput
from worker.lines.files import InputFile, refuse_other_formats
from worker.records.record import BatchFile, encode_record

STANDARD = "-"
GZIP_SUFFIX = ".gz"

# A flush ends a compression block: with one for each record a file of short records grows by half.
FLUSH_EVERY_S = 1.0

OUTPUT_NAME = "output.jsonl"
ERRORS_NAME = "errors.jsonl"
OUTPUT_HELP = f"- is stdout, NAME.gz is compressed, a directory (or NAME/) gets {OUTPUT_NAME} and {ERRORS_NAME}."

WriteRecord = Callable[[Mapping[str, object]], None]


def input_files(names: Sequence[str]) -> list[InputFile]:
    """The files in the given order, those of a pattern such as 'day-*.jsonl' sorted by name; - is stdin.

    A name is a pattern only if no file is called so. Raises BadUsage if one is missing, unreadable or of another format
    (a table, weights), so that half an input is never submitted or run.
    """
    if names.count(STANDARD) > 1:
        raise BadUsage("- is given twice; accepted: standard input once")
    return [_input_file(path) for name in names for path in _paths(name)]


def _paths(name: str) -> list[str]:
    if name == STANDARD or os.path.lexists(name) or not glob.has_magic(name):
        return [name]
    found = sorted(glob.glob(name, recursive=True))
    if not found:
        raise BadUsage(f"{name}: no file has such a name")
    return found


def _input_file(path: str) -> InputFile:
    if path == STANDARD:
        if sys.stdin is None:  # descriptor 0 is closed
            raise BadUsage("-: standard input is closed; accepted: a file, a pipe or a terminal")
        return InputFile(STANDARD, _open_stdin, stat.S_ISREG(os.fstat(sys.stdin.fileno()).st_mode))
    with usable(path):
        is_complete = stat.S_ISREG(os.stat(path).st_mode)
        # Not a pipe: the process that writes to it would lose its reader.
        if is_complete or os.path.isdir(path):
            _open(path).close()
    file = InputFile(path, partial(_open, path), is_complete)
    if is_complete:
        try:
            refuse_other_formats(file)
        except UnreadableInput as error:
            raise BadUsage(str(error)) from error
    return file


@contextmanager
def usable(path: str) -> Iterator[None]:
    """Raise BadUsage where the system refuses what is done with this path."""
    try:
        yield
    except OSError as error:
        raise BadUsage(f"{path}: {error.strerror}") from error


def _open(path: str) -> io.BufferedReader:
    return open(path, "rb")


def _open_stdin() -> io.BufferedReader:
    """Not sys.stdin, for whose lock Python waits at exit, when a thread may still read. Leaves the descriptor open."""
    return open(sys.stdin.fileno(), "rb", closefd=False)


@contextmanager
def open_output(path: str, *, appends: bool = False) -> Iterator[BinaryIO]:
    """Open `path` for writing; a file that exists is replaced, one whose name ends in .gz is compressed.

    With `appends` what is in the file stays, and compressed data go behind it as gzip of their own, which readers take
    for one. Raises BadUsage if it cannot be opened.
    """
    if path == STANDARD:
        yield sys.stdout.buffer
        sys.stdout.buffer.flush()
        return
    with usable(path):
        # Closed below: only the opening may raise BadUsage.
        file = Path(path).open("ab" if appends else "wb")  # noqa: SIM115
    with file:
        if not path.endswith(GZIP_SUFFIX):
            yield file
            return
        with GzipOutput(file) as compressed:
            yield cast("BinaryIO", compressed)


def is_stream(path: str) -> bool:
    """Whether it is standard output, a pipe or a device: what was written there cannot be read again."""
    return path == STANDARD or (os.path.exists(path) and not os.path.isfile(path) and not os.path.isdir(path))


def check_output(path: str) -> None:
    """Raise BadUsage where open_output would; leaves a file that exists as it is, else makes an empty one."""
    if is_stream(path):  # closing a pipe would end it for its reader
        return
    with usable(path):
        Path(path).open("ab").close()


def refuse_same_file(path: str, *, other: str, role: str) -> None:
    """Raise BadUsage if `path` is the other file, which writing would destroy; `role` names that one: "input"."""
    if STANDARD in (path, other):
        return
    try:
        same = os.path.samefile(path, other)
    except OSError:  # one of them does not exist yet
        same = os.path.realpath(path) == os.path.realpath(other)
    if same:
        raise BadUsage(f"{path} is also the {role}; accepted: another file")


def write_line(file: BinaryIO, line: str) -> None:
    """Write one line and flush it: readers wait for no buffer, and a kill loses no line. But see GzipOutput."""
    file.write(line.encode("ascii") + b"\n")
    file.flush()


class GzipOutput(gzip.GzipFile):
    """Flushes at most once a second, when something is written, and at the end.

    A kill loses at most what one second wrote, which stays unflushed until the next write, however late that is.
    """

    def __init__(self, file: BinaryIO) -> None:
        # Without name and time, so that equal records make equal files.
        super().__init__(filename="", mode="wb", fileobj=file, mtime=0)
        self._flushed_at_s = time.monotonic()

    def flush(self, zlib_mode: int = zlib.Z_SYNC_FLUSH) -> None:
        """Flush, unless the last one was within a second: then a later call does."""
        now_s = time.monotonic()
        if now_s - self._flushed_at_s >= FLUSH_EVERY_S:
            super().flush(zlib_mode)
            self._flushed_at_s = now_s


@dataclass(frozen=True, slots=True)
class RecordPaths:
    """One file for all records or, as at OpenAI, one for those with an answer and one for those without."""

    output: str
    errors: str | None  # None: with the others

    @classmethod
    def of(cls, output: str, errors: str | None = None) -> Self:
        """As `-o` and `--errors-file` say; a directory gets output.jsonl and errors.jsonl, and is made if need be.

        A name that ends in / is a directory. Raises BadUsage if it cannot be made, or if both files are one.
        """
        if output != STANDARD and (output.endswith(os.sep) or os.path.isdir(output)):
            with usable(output):
                Path(output).mkdir(parents=True, exist_ok=True)
            errors = str(Path(output, ERRORS_NAME)) if errors is None else errors
            output = str(Path(output, OUTPUT_NAME))
        if errors is not None:
            if output == errors == STANDARD:
                raise BadUsage("--errors-file -: standard output is the output's; accepted: a file")
            refuse_same_file(errors, other=output, role="output")
        return cls(output, errors)

    def __iter__(self) -> Iterator[str]:
        yield self.output
        if self.errors is not None:
            yield self.errors


@contextmanager
def record_output(paths: RecordPaths, *, appends: bool = False) -> Iterator[WriteRecord]:
    """Open the files; yields a function that writes a record to its file at once, as a JSON line. Raises BadUsage."""
    errors = open_output(paths.errors, appends=appends) if paths.errors is not None else nullcontext(None)
    with open_output(paths.output, appends=appends) as output_file, errors as errors_file:

        def write(record: Mapping[str, object]) -> None:
            file = output_file
            if errors_file is not None and BatchFile.of_record(record) is BatchFile.ERROR:
                file = errors_file
            write_line(file, encode_record(record))

        yield write


def write_records(records: Iterable[Mapping[str, object]], write: WriteRecord) -> None:
    """Write records as they come."""
    for record in records:
        write(record)
